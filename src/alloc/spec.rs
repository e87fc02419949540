//! Allocators as people write them: `NAME[+key=value]...`, lists with commas.
//!
//! Commas inside brackets or quotes do not split a list, plus signs inside them do not split
//! parameters: `caching+roundup_power2_divisions=[256:1,>:8],native`.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::workload::meant;

/// An allocator specification is not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// Nothing where a name should be.
    #[error(
        "empty allocator name in {0:?}: expected NAME[+key=value]..., as in caching+torch=2.11"
    )]
    Empty(String),
    /// A parameter without `=`.
    #[error("{parameter:?} in {spec:?} is no parameter: expected key=value")]
    Parameter {
        /// The whole specification.
        spec: String,
        /// The part.
        parameter: String,
    },
    /// A parameter given twice.
    #[error("parameter {key:?} is given twice in {spec:?}")]
    Twice {
        /// The whole specification.
        spec: String,
        /// The key.
        key: String,
    },
    /// A bracket or quote that does not close.
    #[error("a bracket or quote in {0:?} does not close")]
    Unbalanced(String),
    /// No such allocator.
    #[error("no allocator {name:?}; there are: {known}{hint}")]
    UnknownAllocator {
        /// The name.
        name: String,
        /// The names that exist.
        known: String,
        /// What may have been meant, after a semicolon, or nothing.
        hint: String,
    },
    /// The allocator does not know the parameter.
    #[error("allocator {allocator} has no parameter {key:?}; it knows: {known}{hint}")]
    UnknownParameter {
        /// The allocator.
        allocator: String,
        /// The key.
        key: String,
        /// The keys it knows.
        known: String,
        /// What may have been meant, after a semicolon, or nothing.
        hint: String,
    },
    /// The allocator plans ahead, and there is nothing to plan from.
    #[error(
        "allocator {allocator} needs a profile, and this trace has no two steps (marks stepN.phase) to \
         take one from: give another trace of the job as {allocator}+trace=FILE, or --profile-steps 1"
    )]
    NoProfile {
        /// The allocator.
        allocator: String,
    },
    /// A value is not accepted.
    #[error("allocator {allocator}: {message}")]
    Value {
        /// The allocator.
        allocator: String,
        /// What is wrong and what was expected.
        message: String,
    },
}

/// One allocator with its parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocSpec {
    /// Name in the registry.
    pub name: String,
    /// Parameters in the order given.
    pub params: Vec<(String, String)>,
}

impl fmt::Display for AllocSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        for (key, value) in &self.params {
            write!(f, "+{key}={value}")?;
        }
        Ok(())
    }
}

impl FromStr for AllocSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        let mut parts = split_outside(text, '+')?.into_iter().map(str::trim);
        let name = parts.next().unwrap_or_default();
        if name.is_empty() {
            return Err(SpecError::Empty(text.to_owned()));
        }
        let mut params: Vec<(String, String)> = Vec::new();
        for part in parts {
            let Some((key, value)) = part.split_once('=') else {
                return Err(SpecError::Parameter {
                    spec: text.to_owned(),
                    parameter: part.to_owned(),
                });
            };
            let key = key.trim().to_owned();
            if params.iter().any(|(known, _)| *known == key) {
                return Err(SpecError::Twice { spec: text.to_owned(), key });
            }
            params.push((key, unquote(value.trim()).to_owned()));
        }
        Ok(AllocSpec { name: name.to_owned(), params })
    }
}

impl AllocSpec {
    /// Reads a specification that is a parameter of another: in brackets where it has parameters of
    /// its own, as in `inner=[stitch+policy=best]`.
    ///
    /// # Errors
    /// If it is not understood.
    pub fn nested(text: &str) -> Result<AllocSpec, SpecError> {
        let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        bare.unwrap_or(text).parse()
    }

    /// Reads a list: `caching,stitch+policy=best,native`.
    ///
    /// # Errors
    /// The first specification that is not understood.
    pub fn parse_list(text: &str) -> Result<Vec<AllocSpec>, SpecError> {
        split_outside(text, ',')?.into_iter().map(|part| part.trim().parse()).collect()
    }
}

fn unquote(text: &str) -> &str {
    let inner = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    inner
        .or_else(|| text.strip_prefix('\'').and_then(|rest| rest.strip_suffix('\'')))
        .unwrap_or(text)
}

/// Splits at a separator outside brackets and quotes.
fn split_outside(text: &str, separator: char) -> Result<Vec<&str>, SpecError> {
    let mut parts = Vec::new();
    let mut depth = 0usize;
    let mut quote: Option<char> = None;
    let mut start = 0;
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, '[' | '(') => depth += 1,
            (None, ']' | ')') => {
                depth =
                    depth.checked_sub(1).ok_or_else(|| SpecError::Unbalanced(text.to_owned()))?;
            }
            (None, _) if c == separator && depth == 0 => {
                parts.push(&text[start..at]);
                start = at + c.len_utf8();
            }
            _ => {}
        }
    }
    if depth != 0 || quote.is_some() {
        return Err(SpecError::Unbalanced(text.to_owned()));
    }
    parts.push(&text[start..]);
    Ok(parts)
}

/// The parameters of one allocator while it is being built: take those you know, then finish.
#[derive(Debug)]
pub struct Params {
    allocator: String,
    left: BTreeMap<String, String>,
    known: Vec<&'static str>,
}

impl Params {
    /// The parameters of a specification.
    pub fn new(spec: &AllocSpec) -> Params {
        Params {
            allocator: spec.name.clone(),
            left: spec.params.iter().cloned().collect(),
            known: Vec::new(),
        }
    }

    /// The value of a parameter, if given.
    pub fn take(&mut self, key: &'static str) -> Option<String> {
        self.known.push(key);
        self.left.remove(key)
    }

    /// Whether a parameter was given and not yet taken.
    pub fn has(&self, key: &str) -> bool {
        self.left.contains_key(key)
    }

    /// Gives a parameter a value unless one was given.
    pub fn preset(&mut self, key: &str, value: &str) {
        self.left.entry(key.to_owned()).or_insert_with(|| value.to_owned());
    }

    /// The allocator's name.
    pub fn allocator(&self) -> &str {
        &self.allocator
    }

    /// An error about a value.
    pub fn value_error(&self, message: impl Into<String>) -> SpecError {
        SpecError::Value { allocator: self.allocator.clone(), message: message.into() }
    }

    /// Refuses whatever was not taken.
    ///
    /// # Errors
    /// Names the first unknown parameter and all known ones.
    pub fn finish(self) -> Result<(), SpecError> {
        match self.left.into_keys().next() {
            None => Ok(()),
            Some(key) => Err(SpecError::UnknownParameter {
                hint: meant(&key, self.known.iter().copied()),
                allocator: self.allocator,
                key,
                known: if self.known.is_empty() {
                    "none".to_owned()
                } else {
                    self.known.join(", ")
                },
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_inside_brackets_and_quotes_do_not_split() {
        let specs = AllocSpec::parse_list(
            "caching+roundup_power2_divisions=[256:1,>:8]+max_split_size_mb=40, native",
        )
        .expect("parses");
        assert_eq!(specs.len(), 2);
        assert_eq!(specs[0].params[0].1, "[256:1,>:8]");
        assert_eq!(specs[1].name, "native");
        let quoted = AllocSpec::parse_list("x+conf=\"a:1,b:2\",y").expect("parses");
        assert_eq!(quoted[0].params[0].1, "a:1,b:2");
        assert_eq!(quoted.len(), 2);
    }

    #[test]
    fn bad_specs_say_why() {
        assert!(matches!("".parse::<AllocSpec>(), Err(SpecError::Empty(_))));
        assert!(matches!("a+b".parse::<AllocSpec>(), Err(SpecError::Parameter { .. })));
        assert!(matches!("a+b=1+b=2".parse::<AllocSpec>(), Err(SpecError::Twice { .. })));
        assert!(matches!("a+b=[1".parse::<AllocSpec>(), Err(SpecError::Unbalanced(_))));
        assert!(matches!("a+b=1]".parse::<AllocSpec>(), Err(SpecError::Unbalanced(_))));
    }
}
