//! Conditions on rows and cells: `column=value|value`, `column!=value`.

use std::fmt;
use std::str::FromStr;

/// A condition is not understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no condition: expected COLUMN=VALUE, COLUMN=VALUE|VALUE or COLUMN!=VALUE, as in \
     trace=llama-1b-varlen"
)]
pub struct FilterError(String);

/// A condition on one column. Values may have stars, which stand for any letters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Name of the column.
    pub column: String,
    values: Vec<String>,
    excludes: bool,
}

impl FromStr for Filter {
    type Err = FilterError;

    fn from_str(text: &str) -> Result<Filter, FilterError> {
        let wrong = || FilterError(text.to_owned());
        let (column, values) = text.split_once('=').ok_or_else(wrong)?;
        let column = column.trim();
        let excludes = column.ends_with('!');
        let column = column.strip_suffix('!').unwrap_or(column).trim().to_owned();
        if column.is_empty() {
            return Err(wrong());
        }
        let values = values.split('|').map(|value| value.trim().to_owned()).collect();
        Ok(Filter { column, values, excludes })
    }
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.excludes { "!=" } else { "=" };
        write!(f, "{}{sign}{}", self.column, self.values())
    }
}

impl Filter {
    /// The condition that a column has this value.
    pub fn one(column: &str, value: &str) -> Filter {
        Filter { column: column.to_owned(), values: vec![value.to_owned()], excludes: false }
    }

    /// What stands behind the sign.
    pub fn values(&self) -> String {
        self.values.join("|")
    }

    /// Whether a column of this value passes.
    pub fn passes(&self, value: &str) -> bool {
        self.values.iter().any(|pattern| fits(pattern, value)) != self.excludes
    }
}

/// Whether a name fits a pattern in which `*` stands for any letters. Time is the product of the
/// lengths at most.
pub fn fits(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // Where the newest star stands, and the first letter that it does not yet stand for.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if pattern.get(p) == Some(&'*') {
            star = Some((p, n));
            p += 1;
        } else if pattern.get(p) == Some(&name[n]) {
            p += 1;
            n += 1;
        } else if let Some((at, covered)) = star {
            star = Some((at, covered + 1));
            p = at + 1;
            n = covered + 1;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&letter| letter == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_any_letters() {
        for (pattern, name) in
            [("a*", "abc"), ("*", ""), ("*.gz", "a.b.gz"), ("a*b*c", "axxbyc"), ("a*b", "abab")]
        {
            assert!(fits(pattern, name), "{pattern} {name}");
        }
        let name = "llama-1b-varlen.json.zst/caching";
        for pattern in ["*varlen*", "**/caching*", "*llama*caching*", "**", "***"] {
            assert!(fits(pattern, name), "{pattern}");
        }
        for pattern in ["*native*", "*caching*llama*", "*varlen/caching*"] {
            assert!(!fits(pattern, name), "{pattern}");
        }
        for (pattern, name) in [("a*", "ba"), ("", "a"), ("*.gz", "a.gzip"), ("a*b", "abc")] {
            assert!(!fits(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn conditions_take_or_exclude() {
        let one: Filter = "trace=a|b*".parse().unwrap();
        assert!(one.passes("a") && one.passes("bcd") && !one.passes("c"));
        let not: Filter = "trace != a|b".parse().unwrap();
        assert!(not.passes("c") && !not.passes("a"));
        assert_eq!(not.to_string(), "trace!=a|b");
        assert_eq!("trace! = a|b".parse(), Ok(not), "a slip of the space bar is no other column");
        assert!("trace".parse::<Filter>().is_err() && "=a".parse::<Filter>().is_err());
    }
}
