//! Pasted text made searchable.
//!
//! The one design decision: spaces go. A terminal, a logger or a mail program may break a message
//! anywhere, inside a word or before a unit; without spaces the words of a message are still side
//! by side. Each position leads back to the line that it came from.
//!
//! ```text
//!   > [rank3]: ... 447.05 MiB is reserv     \
//!   > ed by PyTorch but **unallocated**     /  447.05mibisreservedbypytorchbutunallocated
//! ```

/// A text without spaces, markup, prefixes and colours, in small letters.
#[derive(Debug, Default)]
pub(super) struct Squeezed {
    /// What is left.
    pub(super) text: String,
    /// The lines of the original that left something.
    lines: Vec<Line>,
}

/// Where a line begins.
#[derive(Debug)]
struct Line {
    offset: usize,
    /// From 1.
    number: u32,
    rank: Option<u32>,
}

impl Squeezed {
    /// Squeezes a text.
    pub(super) fn new(text: &str) -> Squeezed {
        let mut squeezed = Squeezed::default();
        for (index, line) in text.split('\n').enumerate() {
            let offset = squeezed.text.len();
            let line = plain(line);
            squeezed.push(without_prefix(&line));
            if squeezed.text.len() > offset {
                let number = u32::try_from(index + 1).unwrap_or(u32::MAX);
                squeezed.lines.push(Line { offset, number, rank: rank_of(&line) });
            }
        }
        squeezed
    }

    fn push(&mut self, line: &str) {
        let mut chars = line.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                // A line end as JSON and Python write it.
                '\\' if chars.next_if(|&next| matches!(next, 'n' | 'r' | 't')).is_some() => {}
                '`' | '*' | '>' | '|' | '"' | '\'' | '\\' => {}
                c if c.is_whitespace() || c.is_control() || c == '\u{200b}' => {}
                c => self.text.push(c.to_ascii_lowercase()),
            }
        }
    }

    fn line_at(&self, offset: usize) -> Option<&Line> {
        let after = self.lines.partition_point(|line| line.offset <= offset);
        self.lines.get(after.checked_sub(1)?)
    }

    /// The line of the original that a position came from, counted from 1.
    pub(super) fn number_at(&self, offset: usize) -> u32 {
        self.line_at(offset).map_or(1, |line| line.number)
    }

    /// The rank that this line names in front.
    pub(super) fn rank_at(&self, offset: usize) -> Option<u32> {
        self.line_at(offset)?.rank
    }

    /// Up to `length` bytes from a position on.
    pub(super) fn after(&self, offset: usize, length: usize) -> &str {
        let mut end = offset.saturating_add(length).min(self.text.len());
        while !self.text.is_char_boundary(end) {
            end -= 1;
        }
        self.text.get(offset..end).unwrap_or_default()
    }

    /// Up to `length` bytes that end at a position.
    pub(super) fn before(&self, offset: usize, length: usize) -> &str {
        let mut begin = offset.saturating_sub(length);
        while !self.text.is_char_boundary(begin) {
            begin += 1;
        }
        self.text.get(begin..offset).unwrap_or_default()
    }
}

/// Names of HTML for characters that messages hold.
const ENTITIES: [(&str, &str); 6] = [
    ("&nbsp;", " "),
    ("&gt;", ">"),
    ("&lt;", "<"),
    ("&quot;", "\""),
    ("&#39;", "'"),
    ("&amp;", "&"),
];

/// A line without terminal colours and HTML's names for characters.
pub(crate) fn plain(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '\u{1b}' {
            out.push(c);
            continue;
        }
        // ESC [ parameters letter; anything else after ESC is a single character.
        if chars.next_if_eq(&'[').is_some() {
            while chars.next_if(|next| !matches!(next, '@'..='~')).is_some() {}
        }
        chars.next();
    }
    if out.contains('&') {
        for (name, character) in ENTITIES {
            out = out.replace(name, character);
        }
    }
    out
}

/// What loggers and launchers put in front of a line.
fn without_prefix(line: &str) -> &str {
    const LENGTH_MAX: usize = 80;
    let mut rest = line.trim_start_matches(['>', ' ', '\t', '|']);
    loop {
        let closing = match rest.as_bytes().first() {
            Some(b'[') => ']',
            Some(b'(') => ')',
            _ => break,
        };
        let Some(end) = rest.find(closing).filter(|&end| end < LENGTH_MAX) else { break };
        // Parentheses hold figures in a message that is broken there.
        let inside = &rest[1..end];
        if closing == ')' && !["pid=", "Process", "rank"].iter().any(|word| inside.contains(word)) {
            break;
        }
        rest = rest[end + 1..].trim_start_matches([':', ' ']);
        for level in ["INFO", "ERROR", "WARNING", "DEBUG", "CRITICAL"] {
            if let Some(after) = rest.strip_prefix(level) {
                // The date and time that follow.
                rest = after.trim_start_matches(|c: char| {
                    c.is_ascii_digit() || matches!(c, ' ' | '-' | ':' | '.' | ',')
                });
            }
        }
    }
    rest
}

/// The rank that a line names: `[rank3]:`, `[Rank 3]`, `(Worker rank=3 pid=7)`.
pub(crate) fn rank_of(line: &str) -> Option<u32> {
    const NEAR: usize = 120;
    let head: String = line.chars().take(NEAR).collect::<String>().to_ascii_lowercase();
    head.match_indices("rank").find_map(|(at, word)| {
        let rest = head[at + word.len()..].trim_start_matches([' ', '=', ':']);
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..end].parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broken_coloured_and_quoted_lines_become_one() {
        let text = "first\n> [rank3]: \x1b[31m447.05 MiB\x1b[0m is reserv\n\
                    > ed by PyTorch but **unallocated**\\n";
        let squeezed = Squeezed::new(text);
        let expected = "447.05mibisreservedbypytorchbutunallocated";
        let at = squeezed.text.find(expected).expect("found");
        assert_eq!(squeezed.number_at(at), 2);
        assert_eq!(squeezed.rank_at(at), Some(3));
        assert_eq!(squeezed.rank_at(0), None);
        assert_eq!(squeezed.number_at(at + 30), 3);
    }

    #[test]
    fn prefixes_of_loggers_go_and_figures_stay() {
        let line = "(Worker_TP1 pid=6529) ERROR 08-28 17:16:03 [executor.py:1055] torch.Out";
        assert_eq!(without_prefix(line), "torch.Out");
        assert_eq!(without_prefix("(GPU 0; 8.00 GiB total"), "(GPU 0; 8.00 GiB total");
        assert_eq!(without_prefix("[rank0]:[rank0]: CUDA"), "CUDA");
    }

    #[test]
    fn ranks_are_read_in_front_only() {
        assert_eq!(rank_of("(VllmWorker rank=3 pid=1090) ERROR"), Some(3));
        assert_eq!(rank_of("[Rank 12] (after 3 iterations)"), Some(12));
        assert_eq!(rank_of("frank said 7"), None);
    }

    #[test]
    fn cuts_fall_between_characters() {
        let squeezed = Squeezed::new("aéé");
        assert_eq!(squeezed.after(0, 2), "a");
        assert_eq!(squeezed.before(5, 3), "é");
        assert_eq!(squeezed.after(99, 2), "");
    }
}
