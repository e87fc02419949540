//! Results as JSON: pretty, one object for one result, an array for anything more.

use serde::Serialize;

/// One value as pretty JSON with a final line end.
///
/// # Errors
/// If the value cannot be serialised; plain data always can.
pub fn pretty(value: &impl Serialize) -> Result<String, serde_json::Error> {
    let mut text = harmless(serde_json::to_string_pretty(value)?);
    text.push('\n');
    Ok(text)
}

/// Writes as escapes what JSON allows but a terminal may obey: the second set of control
/// characters, and those that turn the direction of text. They stand inside strings only.
fn harmless(text: String) -> String {
    let turns = |c: char| matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let obeyed = |c: char| matches!(c, '\u{7f}'..='\u{9f}') || turns(c);
    if !text.contains(obeyed) {
        return text;
    }
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if obeyed(c) {
            escaped.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            escaped.push(c);
        }
    }
    escaped
}

/// Results as pretty JSON. `single` says that exactly one was asked for: it then stands as an
/// object of its own. The shape follows the question, never how many answers came out.
///
/// # Errors
/// If a value cannot be serialised; plain data always can.
pub fn one_or_many<T: Serialize>(values: &[T], single: bool) -> Result<String, serde_json::Error> {
    match values {
        [one] if single => pretty(one),
        many => pretty(&many),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_obeys_is_escaped() {
        let name = "a\u{9b}31m b\u{202e}c ü";
        let text = pretty(&name).unwrap();
        assert_eq!(text, "\"a\\u009b31m b\\u202ec ü\"\n");
        assert_eq!(serde_json::from_str::<String>(&text).unwrap(), name);
    }

    #[test]
    fn the_shape_follows_the_question() {
        assert_eq!(one_or_many(&[7], true).unwrap(), "7\n");
        assert_eq!(one_or_many(&[7], false).unwrap(), "[\n  7\n]\n");
        assert_eq!(one_or_many(&[7, 8], false).unwrap(), "[\n  7,\n  8\n]\n");
    }
}
