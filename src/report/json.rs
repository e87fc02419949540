//! Results as JSON: pretty, one object for one result, an array for anything more.

use serde::Serialize;

/// One value as pretty JSON with a final line end.
///
/// # Errors
/// If the value cannot be serialised; plain data always can.
pub fn pretty(value: &impl Serialize) -> Result<String, serde_json::Error> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(text)
}

/// Results as pretty JSON. `single` says that exactly one was asked for: it then stands as an object
/// of its own. The shape follows the question, never how many answers came out.
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
    fn the_shape_follows_the_question() {
        assert_eq!(one_or_many(&[7], true).unwrap(), "7\n");
        assert_eq!(one_or_many(&[7], false).unwrap(), "[\n  7\n]\n");
        assert_eq!(one_or_many(&[7, 8], false).unwrap(), "[\n  7,\n  8\n]\n");
    }
}
