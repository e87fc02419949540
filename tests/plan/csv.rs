//! MiniMalloc's CSV: what is read, what is written, what is refused.

use fraglab::engine::{packing_from_minimalloc, problem_from_minimalloc};
use fraglab::import::{
    MinimallocCsv, MinimallocField, MinimallocGap, MinimallocRow, read_minimalloc_csv,
    write_minimalloc_csv,
};
use fraglab::plan::check::check;
use fraglab::plan::{Buffer, Gap};
use proptest::collection::vec;
use proptest::option::of;
use proptest::prelude::*;

use crate::common::shared;

fn read(text: &str) -> MinimallocCsv {
    read_minimalloc_csv(text.as_bytes()).expect("well formed")
}

fn refusal(text: &str) -> String {
    read_minimalloc_csv(text.as_bytes()).expect_err("malformed").to_string()
}

fn written(csv: &MinimallocCsv, offsets: Option<&[u64]>) -> String {
    let mut text = Vec::new();
    write_minimalloc_csv(csv, offsets, &mut text).expect("written");
    String::from_utf8(text).expect("text")
}

fn row(id: &str, lower: u64, upper: u64, size_bytes: u64) -> MinimallocRow {
    MinimallocRow {
        id: id.to_owned(),
        lower,
        upper,
        size_bytes,
        alignment_bytes: 1,
        hint_bytes: None,
        gaps: Vec::new(),
        offset_bytes: None,
        others: Vec::new(),
    }
}

/// The example of MiniMalloc's README with its answer, which is a packing of 12 bytes.
#[test]
fn an_answer_of_minimalloc_is_valid() {
    let csv = read(
        "id,lower,upper,size,offset\nb1,0,3,4,8\nb2,3,9,4,8\nb3,0,9,4,4\nb4,9,21,4,4\nb5,0,21,4,0\n",
    );
    let (problem, offsets) = packing_from_minimalloc(&csv.rows).expect("every row has an offset");
    assert_eq!(check(&problem, &offsets), Ok(vec![12]));
    assert!(problem.buffers.iter().all(|buffer| buffer.extra.is_none()));
    // As a problem, the same file fixes every buffer.
    let fixed = problem_from_minimalloc(&csv.rows);
    assert_eq!(check(&fixed, &offsets), Ok(vec![12]));
    assert!(check(&fixed, &[4, 8, 4, 4, 0]).is_err());
    assert_eq!(packing_from_minimalloc(&read("id,lower,upper,size\nb1,0,3,4\n").rows), None);
}

#[test]
fn every_column_is_read_in_any_order_and_under_every_name() {
    let csv = read(
        "gaps,start,size,offset,buffer_id,upper,hint,alignment\n\
         \"7-8  9-10@1:17 \",6,18,,Big one,12,-1,\n\
         ,5,15,24,0,10,3,8\n",
    );
    let mut big = row("Big one", 6, 12, 18);
    big.gaps = vec![
        MinimallocGap { lower: 7, upper: 8, window_bytes: None },
        MinimallocGap { lower: 9, upper: 10, window_bytes: Some((1, 17)) },
    ];
    let mut small = row("0", 5, 10, 15);
    (small.offset_bytes, small.hint_bytes, small.alignment_bytes) = (Some(24), Some(3), 8);
    assert_eq!(csv.rows, [big, small]);
    let problem = problem_from_minimalloc(&csv.rows);
    let gap = |start, end, window_bytes| Gap { start, end, window_bytes };
    assert_eq!(
        problem.buffers,
        [
            Buffer::new(6, 12, 18)
                .with(|extra| extra.gaps = vec![gap(7, 8, None), gap(9, 10, Some((1, 17)))]),
            Buffer::new(5, 10, 15).with(|extra| {
                extra.alignment_bytes = 8;
                extra.hint_offset_bytes = Some(3);
                extra.fixed_offset_bytes = Some(24);
            }),
        ]
    );
}

/// The last tick is part of lives and gaps under `end`, and of no window.
#[test]
fn ends_are_inclusive_under_that_name() {
    let text = "begin,size,buffer,end,gaps\n6,18,x,11,7-8 10-10@2:13\n3,1,none,2,\n0,1,never,-1,\n";
    let csv = read(text);
    let gap = |lower, upper, window_bytes| MinimallocGap { lower, upper, window_bytes };
    assert_eq!((csv.rows[0].lower, csv.rows[0].upper), (6, 12));
    assert_eq!(csv.rows[0].gaps, [gap(7, 9, None), gap(10, 11, Some((2, 13)))]);
    assert_eq!((csv.rows[1].lower, csv.rows[1].upper), (3, 3));
    assert_eq!((csv.rows[2].lower, csv.rows[2].upper), (0, 0));
    assert_eq!(written(&csv, None), text);
}

#[test]
fn offsets_are_added_or_replaced_and_the_rest_stays() {
    let csv = read("upper,note,id,lower,size\n3,\"x, y\",a,0,4\n9,,b,3,4\n");
    assert_eq!(csv.warnings(), ["the column \"note\" is not used"]);
    let text = "upper,note,id,lower,size,offset\n3,\"x, y\",a,0,4,0\n9,,b,3,4,16\n";
    assert_eq!(written(&csv, Some(&[0, 16])), text);
    let again = read(text);
    assert_eq!(written(&again, None), text);
    let moved = "upper,note,id,lower,size,offset\n3,\"x, y\",a,0,4,8\n9,,b,3,4,0\n";
    assert_eq!(written(&again, Some(&[8, 0])), moved);
    let mut sink = Vec::new();
    let error = write_minimalloc_csv(&csv, Some(&[1]), &mut sink).expect_err("one too few");
    assert_eq!(error.to_string(), "1 offsets for 2 buffers");
    assert!(sink.is_empty());
}

#[test]
fn refusals_name_line_column_and_what_was_expected() {
    const HEADER: &str = "line 1, HEADER; expected id,lower,upper,size[,alignment,hint,gaps,offset], \
                          each once";
    let header = |found: &str| HEADER.replace("HEADER", found);
    assert_eq!(refusal(""), header("no column \"id\""));
    assert_eq!(refusal("id,lower,size\n"), header("no column \"upper\""));
    let twice = header("the columns \"upper\" and \"end\"");
    assert_eq!(refusal("id,lower,upper,size,end\n"), twice);
    let twice = header("the columns \"note\" and \"note\"");
    assert_eq!(refusal("note,id,note,lower,upper,size\n"), twice);
    let start = "id,lower,upper,size,alignment,hint,gaps,offset\na,0,9,4,,,,\n";
    let cases = [
        ("b,0,9,4,,,", "line 3, 7 fields; expected as many fields as the header has"),
        ("b,-1,9,4,,,,", "line 3, column \"lower\": \"-1\"; expected a whole number of ticks"),
        ("b,5,3,4,,,,", "line 3, a life from 5 to 3; expected an end that is not before the start"),
        ("b,0,1e3,4,,,,", "line 3, column \"upper\": \"1e3\"; expected a whole number of ticks"),
        ("b,0,9,,,,,", "line 3, column \"size\": \"\"; expected a whole number of bytes"),
        (
            "b,0,9,9223372036854775808,,,,",
            "line 3, column \"size\": \"9223372036854775808\"; expected a whole number of bytes, \
             from 0 to 2^63 - 1",
        ),
        ("b,0,9,4,0,,,", "line 3, column \"alignment\": \"0\"; expected a whole number of bytes"),
        ("b,0,9,4,,-,,", "line 3, column \"hint\": \"-\"; expected a whole number of bytes"),
        ("b,0,9,4,,,,-1", "line 3, column \"offset\": \"-1\"; expected a whole number of bytes"),
        ("b,0,9,4,,,1-2-3,", "line 3, column \"gaps\": \"1-2-3\"; expected gaps FIRST-LAST"),
    ];
    for (line, message) in cases {
        let found = refusal(&format!("{start}{line}\n"));
        assert!(found.starts_with(message), "{found}");
    }
    for gap in ["A-B", "3", "3-3", "4-3", "1-2@", "1-2@3", "1-2@4:3", "1-2@1:2:3", "1-2,", "-1-2"] {
        let found = refusal(&format!("{start}b,0,9,4,,,{gap},\n"));
        assert!(found.starts_with("line 3, "), "{gap}: {found}");
    }
    let not_text = read_minimalloc_csv(&b"id,lower,upper,size\na,0,9,\xff\n"[..]);
    assert!(not_text.expect_err("no text").to_string().starts_with("line 2, "));
    // One more than the largest end, made half-open, is no number any more.
    let end = format!("id,lower,end,size\na,0,{},1\n", i64::MAX);
    assert!(refusal(&end).starts_with("line 2, column \"end\": "), "{}", refusal(&end));
}

/// Loads that the data's own description gives, found without any solver.
#[test]
fn the_published_problems_are_read_whole() {
    let Some(dir) = shared("data/minimalloc") else { return };
    let expected = [
        ("challenging/A.1048576.csv", 154, 1_048_576),
        ("challenging/C.1048576.csv", 203, 1_039_360),
        ("challenging/D.1048576.csv", 213, 986_112),
        ("challenging/K.1048576.csv", 454, 1_048_576),
        ("examples/input.12.csv", 5, 12),
    ];
    for (name, buffers, load_bytes) in expected {
        let bytes = std::fs::read(dir.join(name)).expect("readable");
        let csv = read_minimalloc_csv(&bytes[..]).expect("well formed");
        let problem = problem_from_minimalloc(&csv.rows);
        assert_eq!(problem.buffers.len(), buffers, "{name}");
        let load = |tick| {
            let live = |buffer: &&Buffer| buffer.start <= tick && tick < buffer.end;
            problem.buffers.iter().filter(live).map(|buffer| buffer.size_bytes).sum::<u64>()
        };
        let highest = problem.buffers.iter().map(|buffer| load(buffer.start)).max();
        assert_eq!(highest, Some(load_bytes), "{name}");
        assert_eq!(written(&csv, None).as_bytes(), bytes, "{name}");
    }
}

fn rows() -> impl Strategy<Value = Vec<MinimallocRow>> {
    let gap = (0..1u64 << 40, 1..9u64, of((0..99u64, 0..99u64)));
    let gap = gap.prop_map(|(lower, ticks, window)| MinimallocGap {
        lower,
        upper: lower + ticks,
        window_bytes: window.map(|(low, bytes)| (low, low + bytes)),
    });
    let number = || prop_oneof![0..9u64, 0..=i64::MAX as u64];
    let plain = ("[a-zA-Z0-9_.,\" ]{0,8}", number(), number(), number());
    let fields = (plain, 1..999u64, of(number()), vec(gap, 0..4), of(number()), ".{0,5}");
    let one = fields.prop_map(|(plain, alignment_bytes, hint_bytes, gaps, offset_bytes, note)| {
        let (id, lower, upper, size_bytes) = plain;
        MinimallocRow {
            alignment_bytes,
            hint_bytes,
            gaps,
            offset_bytes,
            others: vec![note.trim().to_owned()],
            ..row(id.trim(), lower.min(upper), lower.max(upper), size_bytes)
        }
    });
    vec(one, 0..9)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..Default::default() })]

    #[test]
    fn what_is_written_is_read_again(
        rows in rows(),
        names in Just(vec!["id", "lower", "upper", "size", "alignment", "hint", "gaps", "offset", "x"])
            .prop_shuffle(),
        inclusive: bool,
    ) {
        let header = names.join(",").replace("upper", if inclusive { "end" } else { "upper" });
        let csv = MinimallocCsv { rows, ..read(&header) };
        let first = written(&csv, None);
        let again = read(&first);
        prop_assert_eq!(&again, &csv);
        prop_assert_eq!(written(&again, None), first);
    }

    #[test]
    fn the_plainest_form_loses_nothing(rows in rows()) {
        let csv = MinimallocCsv::of(rows.clone());
        let again = read(&written(&csv, None));
        prop_assert_eq!(&again, &csv);
        prop_assert!(again.columns.iter().all(|column| column.field != MinimallocField::Other));
        for (row, again) in rows.into_iter().zip(again.rows) {
            prop_assert_eq!(again, MinimallocRow { others: Vec::new(), ..row });
        }
    }

    /// Whatever the bytes are, there is an answer.
    #[test]
    fn no_bytes_make_the_reader_panic(
        body in "([a-z0-9,@:\\-\"\n ]|id|lower|end|upper|size|gaps|offset){0,80}",
        bytes in vec(any::<u8>(), 0..80),
    ) {
        for start in ["", "id,lower,end,size,gaps,offset\n"] {
            let _ = read_minimalloc_csv(format!("{start}{body}").as_bytes());
            let _ = read_minimalloc_csv(&[start.as_bytes(), &bytes].concat()[..]);
        }
    }
}
