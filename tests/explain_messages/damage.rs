//! What terminals, loggers, mail and people do to a message must not change what it says.

use fraglab::import::{MemoryText, OomMessage, diagnose};

use super::{only, posted, screen};
use crate::common::Rng;

type Mangler = fn(&str) -> String;

/// The same message wherever it stands.
fn placeless(message: &OomMessage) -> OomMessage {
    OomMessage { line: 0, rank: None, ..message.clone() }
}

/// Breaks every line after so many characters, each begun with `prefix`.
fn broken(text: &str, width: usize, prefix: &str) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let chars: Vec<char> = line.chars().collect();
        for part in chars.chunks(width) {
            out.push_str(prefix);
            out.extend(part);
            out.push('\n');
        }
    }
    out
}

#[test]
fn breaks_quotes_colours_and_prefixes_do_not_matter() {
    let manglers: [(&str, Mangler); 7] = [
        ("broken at 72", |text| broken(text, 72, "")),
        ("broken at 41 and quoted", |text| broken(text, 41, "> ")),
        ("prefixed", |text| {
            text.lines().map(|line| format!("[rank7]: {line}\n")).collect::<String>()
        }),
        ("coloured", |text| text.replace("GiB", "\x1b[1;31mGiB\x1b[0m")),
        ("entities", |text| text.replace(' ', "&nbsp;").replace('>', "&gt;")),
        ("carriage returns", |text| text.replace('\n', "\r\n")),
        ("in the middle of a log", |text| {
            format!("loss 3.2, 12 GiB/s free; speed\n{text}\nTraceback: 3 GiB of logs is free\n")
        }),
    ];
    for message in posted() {
        let (expected, diagnosis) = only(&message.text);
        for (name, mangle) in manglers {
            // A prefix of ours hides the rank that a message names itself.
            let (found, other) = only(&mangle(&message.text));
            assert_eq!(placeless(&found), placeless(&expected), "{name}: {}", message.source);
            assert_eq!(other, diagnosis, "{name}: {}", message.source);
        }
    }
}

#[test]
fn many_messages_are_told_apart_and_counted() {
    let posted = posted();
    let one = &posted.iter().find(|message| message.class == "fragmentation").expect("one").text;
    let other = &posted.iter().find(|message| message.class == "driver").expect("one").text;
    let text = format!("{one}\n[rank1]: {other}\n{one}\n{other}\n");
    let found = MemoryText::read(&text);
    // With and without a rank are two.
    let told: Vec<(Option<u32>, u32)> =
        found.messages.iter().map(|message| (message.rank, message.times)).collect();
    assert_eq!(told, [(None, 2), (Some(1), 1), (None, 1)]);
    let screen = screen(&text, false);
    assert!(screen.contains("2 times"), "{screen}");
    assert!(screen.contains("2 more messages in this text: see --full"), "{screen}");
    assert!(screen.lines().count() <= 25, "{screen}");
}

/// A log of many ranks stays one screen, and memory for it stays bounded.
#[test]
fn thousands_of_messages_stay_one_screen() {
    let text: String = (0..5000)
        .map(|index| {
            format!(
                "[rank{}]: CUDA out of memory. Tried to allocate {index}.00 MiB (GPU 0; 40.00 GiB \
                 total capacity; 30.00 GiB already allocated; 1.00 MiB free; 39.00 GiB reserved in \
                 total by PyTorch)\n",
                index % 64
            )
        })
        .collect();
    let found = MemoryText::read(&text);
    assert_eq!((found.messages.len(), found.messages_left_out), (1000, 4000));
    let screen = screen(&text, false);
    assert!(screen.contains("4,999 more messages"), "{screen}");
    assert!(screen.lines().count() <= 25, "{screen}");
}

/// Cut, overwritten and shuffled texts are read without panic, and whatever comes out fits.
#[test]
fn damaged_messages_never_panic() {
    let posted = posted();
    let mut rng = Rng(7);
    let pieces =
        ["99999999999999999999", " GiB", "0", "-1", ".", ";", "\u{1b}[", "é", "\n", "|", "("];
    for round in 0..4000 {
        let mut text = posted[rng.below(posted.len())].text.clone();
        for _ in 0..1 + rng.below(4) {
            let boundaries: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
            if boundaries.is_empty() {
                break;
            }
            let at = boundaries[rng.below(boundaries.len())];
            match rng.below(4) {
                0 => text.truncate(at),
                1 => text.insert_str(at, pieces[rng.below(pieces.len())]),
                2 => {
                    let end = boundaries[rng.below(boundaries.len())].max(at);
                    text.replace_range(at..end, "");
                }
                _ => text = text[at..].to_owned() + &text[..at],
            }
        }
        let found = MemoryText::read(&text);
        for message in &found.messages {
            let _ = diagnose(message);
        }
        let lines = screen(&text, round % 2 == 0).lines().count();
        assert!(round % 2 == 0 || lines <= 25, "{text}");
    }
}

#[test]
fn numbers_beyond_all_machines_are_read() {
    let text = "CUDA out of memory. Tried to allocate 99999999999999999999 GiB (GPU 0; 8.00 GiB \
                total capacity; 1.00 GiB already allocated; 6.00 GiB free; 1.00 GiB reserved in \
                total by PyTorch)";
    let (message, diagnosis) = only(text);
    assert_eq!(message.requested.expect("a request").bytes, u64::MAX >> 1);
    assert_eq!(super::word(&diagnosis.class), "larger_than_device");
    // 17179869184.00 GiB are 2^64 bytes: all ones, for a figure that the driver does not have.
    let text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 \
                GiB of which 0 bytes is free. Including non-PyTorch memory, this process has \
                17179869184.00 GiB memory in use. Of the allocated memory 7.40 GiB is allocated by \
                PyTorch, and 25.00 MiB is reserved by PyTorch but unallocated.";
    let (message, diagnosis) = only(text);
    assert_eq!(message.in_use_by_process, None);
    assert_eq!(super::word(&diagnosis.class), "not_fragmentation");
    assert!(diagnosis.contradictions.is_empty());
}

#[test]
fn figures_that_contradict_each_other_are_pointed_out() {
    let posted = posted();
    let of = |address: &str| {
        let message = posted.iter().find(|message| message.source.ends_with(address));
        let (_, diagnosis) = only(&message.expect(address).text);
        diagnosis.contradictions.iter().map(super::word).collect::<Vec<String>>()
    };
    // 84.98 GiB free of 15.49; 19.84 GiB on 8; 0 bytes used with 20.34 reserved.
    assert_eq!(of("ROCm/TheRock/issues/4598"), ["free_exceeds_capacity"]);
    assert_eq!(of("TMElyralab/MusePose/issues/45"), ["sum_exceeds_capacity"]);
    assert_eq!(of("rhymes-ai/Aria/issues/24"), ["process_below_reserved"]);
    assert!(of("awslabs/keys_values/issues/92").is_empty());
    let shared = "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 8.00 \
                  GiB of which 0 bytes is free. Process 7 has 7.00 GiB memory in use. Process 8 has \
                  6.00 GiB memory in use. Of the allocated memory 5.00 GiB is allocated by PyTorch, \
                  and 1.00 MiB is reserved by PyTorch but unallocated.";
    let told: Vec<String> = only(shared).1.contradictions.iter().map(super::word).collect();
    assert_eq!(told, ["processes_exceed_capacity"]);
}
