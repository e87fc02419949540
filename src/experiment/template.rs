//! Texts in which `{key}` stands for the value of a parameter.
//!
//! Braces around anything but a name are left alone: allocator settings have brackets of their own.

/// Whether a text may be the name of a parameter.
pub(super) fn is_name(text: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_';
    !text.is_empty() && text.chars().all(fits)
}

/// Names in braces, in order.
pub(super) fn names(text: &str) -> Vec<&str> {
    let inside = text.split('{').skip(1).filter_map(|rest| Some(rest.split_once('}')?.0));
    inside.filter(|name| is_name(name)).collect()
}

/// Puts values in place of names; what has none stays.
pub(super) fn filled<'v>(text: &str, value: impl Fn(&str) -> Option<&'v str>) -> String {
    let mut filled = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        filled.push_str(before);
        let name = after.split_once('}').filter(|(name, _)| is_name(name));
        match name.and_then(|(name, behind)| Some((value(name)?, behind))) {
            Some((value, behind)) => {
                filled.push_str(value);
                rest = behind;
            }
            None => {
                filled.push('{');
                rest = after;
            }
        }
    }
    filled.push_str(rest);
    filled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_filled_and_other_braces_stay() {
        let value = |name: &str| match name {
            "a" => Some("1"),
            "b" => Some("{a}"),
            _ => None,
        };
        assert_eq!(names("x{a}-{b}{ c }{d"), ["a", "b"]);
        // What is filled in is not filled again.
        assert_eq!(filled("x{a}-{b}{ c }{d", value), "x1-{a}{ c }{d");
        assert_eq!(filled("{c}{a}", value), "{c}1");
    }
}
