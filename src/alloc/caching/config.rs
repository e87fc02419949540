//! Settings of the caching allocator, parsed as PyTorch parses them (spec 2.2 and 7).

use std::fmt;

use super::version::{LATER_KEYS, TorchVersion};
use crate::units::MIB;
use crate::workload::meant;

/// Segment size for large requests below 10 MiB, unless the option says otherwise.
const LARGE_SEGMENT_MB_DEFAULT: u64 = 20;
/// Entries of the power-of-two table: 1 MiB to 32 GiB and above (spec 2.2).
pub(super) const ROUNDUP_ENTRIES: usize = 16;
/// Blocks are multiples of this many bytes.
pub(super) const MIN_BLOCK_BYTES: u64 = 512;

/// A settings string is not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("allocator settings, character {position}: {message} (in {:?})", quoted(.settings))]
pub struct ConfigError {
    /// Position of the offending word in the string, in characters from 1.
    pub position: usize,
    /// What is wrong, and what was expected.
    pub message: String,
    /// The whole string.
    pub settings: String,
}

impl ConfigError {
    /// The string and, on a second line, a caret under the offending word. White space of any kind
    /// is shown as blanks; of a very long string only the part around the word is.
    pub fn excerpt(&self) -> String {
        const AROUND: usize = 60;
        let caret = self.position.saturating_sub(1);
        let skipped = caret.saturating_sub(AROUND);
        let blank = |c: char| if c.is_whitespace() || c.is_control() { ' ' } else { c };
        let shown: String =
            self.settings.chars().skip(skipped).take(2 * AROUND).map(blank).collect();
        format!("{}\n{}^", shown.trim_end(), " ".repeat(caret - skipped))
    }
}

/// As much of a settings string as a message quotes.
fn quoted(settings: &str) -> String {
    settings.chars().take(200).collect()
}

/// Every option that bears on placement.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The release whose rules read the string.
    pub version: TorchVersion,
    /// Blocks of at least this are never split; `u64::MAX` is unlimited.
    pub max_split_size_bytes: u64,
    /// Slack when an oversize block is matched.
    pub max_non_split_rounding_bytes: u64,
    /// Garbage collection starts at this share of the limit; 0 is off.
    pub garbage_collection_threshold: f64,
    /// Divisions between powers of two, by the table of spec 2.2; 0 is plain rounding.
    pub roundup_power2_divisions: [u64; ROUNDUP_ENTRIES],
    /// Segment size for requests in (1 MiB, 10 MiB).
    pub large_segment_size_bytes: u64,
    /// Memory comes in growing segments.
    pub expandable_segments: bool,
    /// Memory limit as a share of the device's total memory; 1 is none.
    pub per_process_memory_fraction: f64,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            version: TorchVersion::REFERENCE,
            max_split_size_bytes: u64::MAX,
            max_non_split_rounding_bytes: LARGE_SEGMENT_MB_DEFAULT * MIB,
            garbage_collection_threshold: 0.0,
            roundup_power2_divisions: [0; ROUNDUP_ENTRIES],
            large_segment_size_bytes: LARGE_SEGMENT_MB_DEFAULT * MIB,
            expandable_segments: false,
            per_process_memory_fraction: 1.0,
        }
    }
}

/// Every key, with one line for `fraglab list`.
pub(super) const KEYS: [(&str, &str); 15] = [
    ("large_segment_size_mb", "segment size for requests in (1, 10) MiB; above 10, default 20"),
    ("max_split_size_mb", "blocks of at least this are never split; at least the segment size"),
    ("max_non_split_rounding_mb", "slack in matching blocks that are never split"),
    ("garbage_collection_threshold", "share of the limit at which old blocks go back; in (0, 1)"),
    ("roundup_power2_divisions", "N, or [SIZE_MB:N,...,>:N]: round sizes up between powers of two"),
    ("expandable_segments", "memory in growing segments: True or False"),
    ("per_process_memory_fraction", "memory limit as a share of the device, 0 to 1"),
    ("backend", "native; cudaMallocAsync is not modelled"),
    ("release_lock_on_cudamalloc", "accepted, no effect on placement"),
    ("release_lock_on_hipmalloc", "accepted, no effect on placement"),
    ("graph_capture_record_stream_reuse", "accepted, no effect outside captures"),
    ("pinned_use_background_threads", "accepted, host memory only"),
    ("pinned_use_cuda_host_register", "accepted, host memory only"),
    ("pinned_num_register_threads", "accepted, host memory only"),
    ("pinned_reserve_segment_size_mb", "accepted, host memory only"),
];

impl Config {
    /// Parses a `PYTORCH_CUDA_ALLOC_CONF` string (spec 7.1) as PyTorch 2.11 does: `key:value,...`,
    /// white space ignored, numbers read by prefix, the last of two equal keys wins.
    ///
    /// # Errors
    /// The first word that PyTorch would refuse, with its position.
    pub fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse_for(TorchVersion::REFERENCE, text)
    }

    /// [`Self::parse`] by the rules of another release, as far as they are known:
    /// [`TorchVersion::differences`].
    ///
    /// # Errors
    /// The first word that this release would refuse, with its position.
    pub fn parse_for(version: TorchVersion, text: &str) -> Result<Config, ConfigError> {
        let mut config = Config { version, ..Config::default() };
        config.read(text)?;
        Ok(config)
    }

    /// The settings after the program gives another string while it runs (spec 7.1).
    /// `max_split_size_mb`, `max_non_split_rounding_mb`, `garbage_collection_threshold` and
    /// `roundup_power2_divisions` fall back to their defaults unless given again; all others keep
    /// their values. `per_process_memory_fraction` is read at the start only: a later one is
    /// checked, and changes nothing.
    ///
    /// # Errors
    /// The first word that PyTorch would refuse, with its position. PyTorch keeps what stood before
    /// that word; here the whole string is refused.
    pub fn change(&self, text: &str) -> Result<Config, ConfigError> {
        let mut config = self.clone();
        config.read(text)?;
        config.per_process_memory_fraction = self.per_process_memory_fraction;
        Ok(config)
    }

    /// What every settings string does, the first and later ones.
    fn read(&mut self, text: &str) -> Result<(), ConfigError> {
        let tokens = tokenize(text);
        // The segment size bounds other options, so PyTorch reads it before all others.
        for_each_pair(&tokens, text, |key, value| {
            if key.text == "large_segment_size_mb" && self.version.knows(&key.text) {
                self.set_large_segment(value)?;
            }
            Ok(())
        })?;
        *self = Config {
            version: self.version,
            large_segment_size_bytes: self.large_segment_size_bytes,
            max_non_split_rounding_bytes: self.large_segment_size_bytes,
            expandable_segments: self.expandable_segments,
            per_process_memory_fraction: self.per_process_memory_fraction,
            ..Config::default()
        };
        for_each_pair(&tokens, text, |key, value| self.set(key, value))
    }

    fn set_large_segment(&mut self, value: &Value<'_>) -> Result<(), ConfigError> {
        let mb = value.number()?;
        if mb <= 10 {
            return Err(value.error("large_segment_size_mb must be above 10"));
        }
        self.large_segment_size_bytes = value.mib(mb)?;
        Ok(())
    }

    fn set(&mut self, key: &Token<'_>, value: &Value<'_>) -> Result<(), ConfigError> {
        if !self.version.knows(&key.text) {
            return Err(self.unknown(key));
        }
        match key.text.as_str() {
            "large_segment_size_mb" => {}
            "max_split_size_mb" => {
                self.max_split_size_bytes = self.at_least_a_segment("max_split_size_mb", value)?;
            }
            "max_non_split_rounding_mb" => {
                self.max_non_split_rounding_bytes =
                    self.at_least_a_segment("max_non_split_rounding_mb", value)?;
            }
            "garbage_collection_threshold" => {
                let threshold = value.real()?;
                if !(threshold > 0.0 && threshold < 1.0) {
                    return Err(
                        value.error("garbage_collection_threshold must lie between 0 and 1")
                    );
                }
                self.garbage_collection_threshold = threshold;
            }
            "roundup_power2_divisions" => {
                self.roundup_power2_divisions = roundup_table(value, self.version)?;
            }
            "expandable_segments" => self.expandable_segments = value.boolean()?,
            "per_process_memory_fraction" => {
                let fraction = value.real()?;
                if !(0.0..=1.0).contains(&fraction) {
                    return Err(value.error("per_process_memory_fraction must lie in 0 to 1"));
                }
                self.per_process_memory_fraction = fraction;
            }
            "backend" => match value.word()? {
                "native" => {}
                "cudaMallocAsync" => {
                    return Err(value.error(
                        "backend cudaMallocAsync is not modelled: the driver decides placement; \
                         nor can the backend change while the program runs",
                    ));
                }
                _ => return Err(value.error("backend must be native or cudaMallocAsync")),
            },
            "release_lock_on_cudamalloc"
            | "release_lock_on_hipmalloc"
            | "graph_capture_record_stream_reuse"
            | "pinned_use_background_threads"
            | "pinned_use_cuda_host_register"
            | "pinned_use_hip_host_register" => {
                value.boolean()?;
            }
            "pinned_num_register_threads" => {
                let threads = value.number()?;
                if !threads.is_power_of_two() || threads > 128 {
                    return Err(value.error("must be a power of two, at most 128"));
                }
            }
            "pinned_reserve_segment_size_mb" => {
                if value.number()? == 0 {
                    return Err(value.error("must be above 0"));
                }
            }
            later if LATER_KEYS.contains(&later) => {
                value.boolean()?;
            }
            _ => return Err(self.unknown(key)),
        }
        Ok(())
    }

    fn unknown(&self, key: &Token<'_>) -> ConfigError {
        let keys = KEYS.iter().map(|&(key, _)| key).chain(LATER_KEYS);
        let known: Vec<&str> = keys.filter(|key| self.version.knows(key)).collect();
        let (name, version) = (&key.text, self.version);
        let hint = meant(name, known.iter().copied());
        let known = known.join(", ");
        key.error(format!("unknown option {name:?}; PyTorch {version} knows: {known}{hint}"))
    }

    fn at_least_a_segment(&self, key: &str, value: &Value<'_>) -> Result<u64, ConfigError> {
        let bytes = value.mib(value.number()?)?;
        if bytes < self.large_segment_size_bytes {
            let least_mb = self.large_segment_size_bytes / MIB;
            return Err(value.error(format!("{key} must be at least {least_mb}")));
        }
        Ok(bytes)
    }

    /// The size that a request is rounded to (spec 2.1, 2.2). `request_bytes` is at most 2^60 − 1.
    #[inline]
    pub fn round_size(&self, request_bytes: u64) -> u64 {
        if request_bytes < MIN_BLOCK_BYTES {
            return MIN_BLOCK_BYTES;
        }
        // Everything below 2 MiB uses the first entry, everything from 32 GiB the last.
        let entry = (request_bytes.ilog2() as usize).saturating_sub(20).min(ROUNDUP_ENTRIES - 1);
        let divisions = self.roundup_power2_divisions[entry];
        if divisions > 1 && request_bytes > MIN_BLOCK_BYTES.saturating_mul(divisions) {
            if request_bytes.is_power_of_two() {
                return request_bytes;
            }
            let step = (1u64 << request_bytes.ilog2()) / divisions;
            return request_bytes.next_multiple_of(step);
        }
        request_bytes.next_multiple_of(MIN_BLOCK_BYTES)
    }

    /// The limit that `per_process_memory_fraction` sets on a device, if below 1 (spec 7.3).
    pub fn limit_bytes(&self, device_total_bytes: u64) -> Option<u64> {
        let fraction = self.per_process_memory_fraction;
        (fraction < 1.0).then_some((fraction * device_total_bytes as f64) as u64)
    }

    /// Effective settings, by key.
    pub fn params(&self) -> Vec<(String, String)> {
        let mb = |bytes: u64| (bytes / MIB).to_string();
        let split = match self.max_split_size_bytes {
            u64::MAX => "unlimited".to_owned(),
            bytes => mb(bytes),
        };
        let divisions = self.roundup_power2_divisions;
        let roundup = if divisions.iter().all(|&entry| entry == divisions[0]) {
            divisions[0].to_string()
        } else {
            let entry = |(index, count): (usize, &u64)| format!("{}:{count}", 1u64 << index);
            let entries: Vec<String> = divisions.iter().enumerate().map(entry).collect();
            format!("[{}]", entries.join(","))
        };
        let boolean = if self.expandable_segments { "True" } else { "False" };
        let pair = |key: &str, value: String| (key.to_owned(), value);
        vec![
            pair("expandable_segments", boolean.to_owned()),
            pair("garbage_collection_threshold", self.garbage_collection_threshold.to_string()),
            pair("large_segment_size_mb", mb(self.large_segment_size_bytes)),
            pair("max_non_split_rounding_mb", mb(self.max_non_split_rounding_bytes)),
            pair("max_split_size_mb", split),
            pair("per_process_memory_fraction", self.per_process_memory_fraction.to_string()),
            pair("roundup_power2_divisions", roundup),
        ]
    }
}

/// The table of spec 2.2 from a single value or a list.
fn roundup_table(
    value: &Value<'_>,
    version: TorchVersion,
) -> Result<[u64; ROUNDUP_ENTRIES], ConfigError> {
    let mut table = [0; ROUNDUP_ENTRIES];
    let list = match value {
        Value::Single(_) => {
            let divisions = value.number()?;
            if !divisions.is_power_of_two() {
                return Err(value.error("divisions must be a power of two"));
            }
            return Ok([divisions; ROUNDUP_ENTRIES]);
        }
        Value::List { items, .. } => items,
    };
    let mut last = 0;
    for (position, (key, item)) in list.iter().enumerate() {
        let divisions = item.number()?;
        if divisions != 0 && !divisions.is_power_of_two() {
            return Err(item.error("divisions must be 0 or a power of two"));
        }
        if key.text == ">" {
            // The entries after the last key's, to the end; in older releases from that one on.
            let first = if version.rest_includes_last_key() { last } else { last + 1 };
            table[first.min(ROUNDUP_ENTRIES)..].fill(divisions);
            continue;
        }
        let size_mb = key.number()?;
        if !size_mb.is_power_of_two() {
            return Err(key.error("sizes in the list must be powers of two, in MB".to_owned()));
        }
        let entry = (size_mb.ilog2() as usize).min(ROUNDUP_ENTRIES - 1);
        if position == 0 {
            table[..entry].fill(divisions);
        }
        table[entry] = divisions;
        last = entry;
    }
    Ok(table)
}

/// A word or one of `: , [ ]`, and where it stands.
#[derive(Clone, Debug)]
struct Token<'a> {
    text: String,
    position: usize,
    source: &'a str,
}

impl Token<'_> {
    fn error(&self, message: String) -> ConfigError {
        ConfigError { position: self.position, message, settings: self.source.to_owned() }
    }

    /// What stands here, for an error.
    fn found(&self) -> String {
        if self.text.is_empty() { "the end".to_owned() } else { format!("{:?}", self.text) }
    }

    /// A whole number, read by prefix: `100abc` is 100.
    fn number(&self) -> Result<u64, ConfigError> {
        whole_prefix(&self.text)
            .parse()
            .map_err(|_| self.error(format!("expected a whole number, found {:?}", self.text)))
    }
}

impl fmt::Display for Token<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The value behind a key.
#[derive(Clone, Debug)]
enum Value<'a> {
    Single(Token<'a>),
    List { open: Token<'a>, items: Vec<(Token<'a>, Value<'a>)> },
}

impl Value<'_> {
    fn token(&self) -> &Token<'_> {
        match self {
            Value::Single(token) => token,
            Value::List { open, .. } => open,
        }
    }

    fn error(&self, message: impl Into<String>) -> ConfigError {
        self.token().error(message.into())
    }

    fn word(&self) -> Result<&str, ConfigError> {
        match self {
            Value::Single(token) => Ok(&token.text),
            Value::List { .. } => Err(self.error("a list is not expected here")),
        }
    }

    fn number(&self) -> Result<u64, ConfigError> {
        self.word()?;
        self.token().number()
    }

    fn mib(&self, mb: u64) -> Result<u64, ConfigError> {
        // PyTorch caps such values instead of overflowing.
        Ok(mb.min(u64::MAX / MIB) * MIB)
    }

    /// A number with a fraction, read by prefix as C's `strtod` does.
    fn real(&self) -> Result<f64, ConfigError> {
        let text = self.word()?;
        real_prefix(text)
            .parse::<f64>()
            .ok()
            .filter(|number| number.is_finite())
            .ok_or_else(|| self.error(format!("expected a number, found {text:?}")))
    }

    fn boolean(&self) -> Result<bool, ConfigError> {
        match self.word()? {
            "True" => Ok(true),
            "False" => Ok(false),
            other => Err(self.error(format!("expected True or False, found {other:?}"))),
        }
    }
}

/// The digits that a word begins with: what PyTorch reads of a whole number.
pub(super) fn whole_prefix(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    &text[..end]
}

/// The longest beginning of a word that is a number with or without fraction and exponent: what C's
/// `strtod` reads of it, but for its hexadecimal numbers and names of infinity.
pub(super) fn real_prefix(text: &str) -> &str {
    let digits_end =
        |from: usize| from + text[from..].bytes().take_while(u8::is_ascii_digit).count();
    let sign_bytes = |from: usize| usize::from(text[from..].starts_with(['+', '-']));
    let begin = sign_bytes(0);
    let mut end = digits_end(begin);
    let mut digits = end - begin;
    if text[end..].starts_with('.') {
        let point = end;
        end = digits_end(point + 1);
        digits += end - point - 1;
    }
    if digits == 0 {
        return "";
    }
    if text[end..].starts_with(['e', 'E']) {
        let exponent = end + 1 + sign_bytes(end + 1);
        let exponent_end = digits_end(exponent);
        if exponent_end > exponent {
            end = exponent_end;
        }
    }
    &text[..end]
}

/// An option as it stands in a settings string, white space left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenOption {
    /// Its name.
    pub key: String,
    /// Its value as written; a list with its brackets.
    pub value: String,
    /// The sizes (or `>`) and divisions of a list.
    pub items: Vec<(String, String)>,
}

/// The options of a string in the order given, repeated ones too.
///
/// # Errors
/// The first place where the string is not `key:value,...`; whether PyTorch knows the options and
/// takes the values is not looked at.
pub(super) fn given_options(text: &str) -> Result<Vec<GivenOption>, ConfigError> {
    let mut options = Vec::new();
    for_each_pair(&tokenize(text), text, |key, value| {
        let (value, items) = match value {
            Value::Single(word) => (word.text.clone(), Vec::new()),
            Value::List { items, .. } => {
                let pair = |(size, divisions): &(Token<'_>, Value<'_>)| {
                    (size.text.clone(), divisions.token().text.clone())
                };
                let items: Vec<(String, String)> = items.iter().map(pair).collect();
                (list_text(&items), items)
            }
        };
        options.push(GivenOption { key: key.text.clone(), value, items });
        Ok(())
    })?;
    Ok(options)
}

/// A list as it is written in a settings string.
pub(super) fn list_text(items: &[(String, String)]) -> String {
    let item = |(size, divisions): &(String, String)| format!("{size}:{divisions}");
    format!("[{}]", items.iter().map(item).collect::<Vec<_>>().join(","))
}

/// Splits into words and punctuation; white space counts for nothing, even inside a word.
fn tokenize(text: &str) -> Vec<Token<'_>> {
    let mut tokens: Vec<Token<'_>> = Vec::new();
    let mut in_word = false;
    for (index, c) in text.chars().enumerate() {
        if c.is_whitespace() {
            continue;
        }
        let punctuation = matches!(c, ':' | ',' | '[' | ']');
        match tokens.last_mut() {
            Some(last) if in_word && !punctuation => last.text.push(c),
            _ => tokens.push(Token { text: c.to_string(), position: index + 1, source: text }),
        }
        in_word = !punctuation;
    }
    tokens
}

/// Walks `key:value` pairs, with a list as value where a bracket opens.
fn for_each_pair<'a>(
    tokens: &[Token<'a>],
    source: &'a str,
    mut visit: impl FnMut(&Token<'a>, &Value<'a>) -> Result<(), ConfigError>,
) -> Result<(), ConfigError> {
    let mut reader = Reader { tokens, at: 0, source };
    while reader.at < tokens.len() {
        let key = reader.word("an option name")?;
        reader.punctuation(":")?;
        let value = reader.value()?;
        visit(&key, &value)?;
        if reader.at < tokens.len() {
            reader.punctuation(",")?;
        }
    }
    Ok(())
}

struct Reader<'t, 'a> {
    tokens: &'t [Token<'a>],
    at: usize,
    source: &'a str,
}

impl<'a> Reader<'_, 'a> {
    fn next(&mut self) -> Token<'a> {
        let token = self.tokens.get(self.at).cloned();
        self.at += 1;
        token.unwrap_or_else(|| Token {
            text: String::new(),
            position: self.source.chars().count() + 1,
            source: self.source,
        })
    }

    fn word(&mut self, what: &str) -> Result<Token<'a>, ConfigError> {
        let token = self.next();
        if matches!(token.text.as_str(), "" | ":" | "," | "[" | "]") {
            return Err(token.error(format!("expected {what}, found {}", token.found())));
        }
        Ok(token)
    }

    fn punctuation(&mut self, expected: &str) -> Result<(), ConfigError> {
        let token = self.next();
        if token.text != expected {
            return Err(token.error(format!("expected {expected:?}, found {}", token.found())));
        }
        Ok(())
    }

    fn value(&mut self) -> Result<Value<'a>, ConfigError> {
        if self.tokens.get(self.at).is_none_or(|token| token.text != "[") {
            return self.word("a value").map(Value::Single);
        }
        let open = self.next();
        let mut items = Vec::new();
        loop {
            let key = self.word("a size or >")?;
            self.punctuation(":")?;
            items.push((key, Value::Single(self.word("a number of divisions")?)));
            let token = self.next();
            match token.text.as_str() {
                "," => {}
                "]" => return Ok(Value::List { open, items }),
                _ => return Err(token.error(format!("expected , or ], found {}", token.found()))),
            }
        }
    }
}

/// Strings that the binary refuses, and where.
#[cfg(test)]
pub(super) const REFUSED: [(&str, usize); 18] = [
    ("max_split_size_mb:19", 19),
    ("max_split_size_mb", 18),
    ("max_split_size_mb:", 19),
    ("max_split_size_mb:abc", 19),
    ("max_split_size:40", 1),
    ("expandable_segments:true", 21),
    ("garbage_collection_threshold:1.0", 30),
    ("garbage_collection_threshold:0", 30),
    ("large_segment_size_mb:10", 23),
    ("roundup_power2_divisions:3", 26),
    ("roundup_power2_divisions:0", 26),
    ("roundup_power2_divisions:[3:2]", 27),
    ("roundup_power2_divisions:[4:3]", 29),
    ("roundup_power2_divisions:[4:2", 30),
    ("per_process_memory_fraction:1.5", 29),
    ("throw_on_cudamalloc_oom:True", 1),
    ("backend:none", 9),
    ("max_split_size_mb:40 garbage_collection_threshold:0.5", 50),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn table(text: &str) -> [u64; 16] {
        Config::parse(&format!("roundup_power2_divisions:{text}"))
            .expect("accepted")
            .roundup_power2_divisions
    }

    /// The examples of spec 2.2, seen on the binary.
    #[test]
    fn roundup_lists_fill_as_on_the_binary() {
        assert_eq!(
            table("[256:1,512:2,1024:4,>:8]"),
            [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8]
        );
        assert_eq!(
            table("[64:8,256:4,1024:4,>:1]"),
            [8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 4, 1, 1, 1, 1, 1]
        );
        assert_eq!(table("[>:8]"), [0, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8]);
        assert_eq!(table("[4:2,8:4]"), [2, 2, 2, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(table("[65536:2]"), [2; 16]);
        assert_eq!(table("4"), [4; 16]);
    }

    #[test]
    fn rounding_follows_the_table() {
        let plain = Config::default();
        assert_eq!(plain.round_size(1), 512);
        assert_eq!(plain.round_size(513), 1024);
        // Values of vector V16.
        let four = Config::parse("roundup_power2_divisions:4").expect("accepted");
        assert_eq!(four.round_size(1200), 1536);
        assert_eq!(four.round_size(2048), 2048);
        assert_eq!(four.round_size(2100), 2560);
        assert_eq!(four.round_size(1_500_000), 1_572_864);
        assert_eq!(four.round_size(11_000_000), 12_582_912);
        assert_eq!(four.round_size((1 << 60) - 1), 1 << 60);
        // More divisions than a request has units: plain rounding (r > 512 d does not hold).
        let huge = Config::parse("roundup_power2_divisions:9223372036854775808").expect("accepted");
        assert_eq!(huge.round_size(1_153_434), 1_153_536);
    }

    #[test]
    fn strings_parse_as_on_the_binary() {
        let config =
            Config::parse(" max_split_size_mb : 100abc , garbage_collection_threshold:0.5x,")
                .expect("prefix numbers and white space are accepted");
        assert_eq!(config.max_split_size_bytes, 100 * MIB);
        assert_eq!(config.garbage_collection_threshold, 0.5);
        let twice = Config::parse("max_split_size_mb:100,max_split_size_mb:200").expect("accepted");
        assert_eq!(twice.max_split_size_bytes, 200 * MIB, "the last wins");
        let segment = Config::parse("max_split_size_mb:15,large_segment_size_mb:12").expect("ok");
        assert_eq!(segment.large_segment_size_bytes, 12 * MIB, "read before all others");
        assert_eq!(segment.max_non_split_rounding_bytes, 12 * MIB);
        assert_eq!(Config::parse("").expect("empty"), Config::default());
        let half = Config::parse("per_process_memory_fraction:0.5").expect("ok");
        assert_eq!(half.limit_bytes(100 * MIB), Some(50 * MIB));
        assert_eq!(Config::default().limit_bytes(100 * MIB), None);
    }

    fn version(text: &str) -> TorchVersion {
        text.parse().expect("a version")
    }

    /// Spec 7.1: which options a later string resets, which it keeps.
    #[test]
    fn a_later_string_resets_four_options_and_keeps_the_rest() {
        let first = Config::parse(
            "large_segment_size_mb:30,max_split_size_mb:64,max_non_split_rounding_mb:50,\
             garbage_collection_threshold:0.5,roundup_power2_divisions:4,\
             expandable_segments:True,per_process_memory_fraction:0.25",
        )
        .expect("accepted");
        let expected = Config {
            large_segment_size_bytes: 30 * MIB,
            max_non_split_rounding_bytes: 30 * MIB,
            expandable_segments: true,
            per_process_memory_fraction: 0.25,
            ..Config::default()
        };
        for text in ["", "backend:native", "per_process_memory_fraction:0.75"] {
            assert_eq!(first.change(text).expect(text), expected, "{text}");
        }
        let changed = first
            .change("expandable_segments:False,max_split_size_mb:100,large_segment_size_mb:40")
            .expect("accepted");
        assert!(!changed.expandable_segments);
        assert_eq!(changed.max_split_size_bytes, 100 * MIB);
        assert_eq!(changed.large_segment_size_bytes, 40 * MIB);
        assert_eq!(changed.max_non_split_rounding_bytes, 40 * MIB, "the current segment size");
        assert_eq!(changed.garbage_collection_threshold, 0.0);
    }

    #[test]
    fn a_later_string_is_refused_as_a_whole() {
        let first = Config::parse("max_split_size_mb:64,large_segment_size_mb:30").expect("ok");
        for (text, position) in [
            ("expandable_segments:True,max_split_size_mb:29", 44),
            ("backend:cudaMallocAsync", 9),
            ("per_process_memory_fraction:1.5", 29),
        ] {
            let error = first.change(text).expect_err(text);
            assert_eq!(error.position, position, "{text}: {error}");
        }
        let backend = first.change("backend:cudaMallocAsync").expect_err("cannot change");
        assert!(backend.message.contains("while the program runs"), "{backend}");
        let old = Config::parse_for(version("2.8"), "").expect("empty");
        assert!(old.change("large_segment_size_mb:40").is_err(), "keeps the version");
    }

    /// Spec 15: what differs in other releases.
    #[test]
    fn other_releases_have_rules_of_their_own() {
        let table = |release: &str, list: &str| {
            let text = format!("roundup_power2_divisions:{list}");
            let config = Config::parse_for(version(release), &text).expect("accepted");
            config.roundup_power2_divisions
        };
        let list = "[256:1,512:2,1024:4,>:8]";
        assert_eq!(table("2.9", list), [1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 8, 8, 8, 8, 8, 8]);
        assert_eq!(table("2.9", "[>:8]"), [8; 16]);
        assert_eq!(table("2.9", "[65536:2,>:4]")[15], 4);
        assert_eq!(table("2.12", list), table("2.11", list));
        for recent in ["large_segment_size_mb:30", "per_process_memory_fraction:0.5"] {
            let error = Config::parse_for(version("2.10"), recent).expect_err(recent);
            assert_eq!(error.position, 1, "{error}");
            assert!(error.message.contains("PyTorch 2.10 knows"), "{error}");
            let key = recent.split(':').next().expect("a key");
            assert_eq!(error.message.matches(key).count(), 1, "not among the known: {error}");
            assert!(Config::parse_for(version("2.12"), recent).is_ok(), "{recent}");
        }
        for later in ["throw_on_cudamalloc_oom:True", "pinned_free_catch_all:False"] {
            let config = Config::parse_for(version("2.12"), later).expect(later);
            let plain = Config { version: version("2.12"), ..Config::default() };
            assert_eq!(config, plain, "no effect");
            assert_eq!(Config::parse(later).expect_err(later).position, 1);
        }
    }

    #[test]
    fn errors_point_at_the_word() {
        let excerpt = |text: &str| Config::parse(text).expect_err(text).excerpt();
        assert_eq!(excerpt("backend:none"), "backend:none\n        ^");
        assert_eq!(excerpt("backend:\n none"), "backend:  none\n          ^");
        assert_eq!(excerpt("backend:"), "backend:\n        ^");
        let long = format!("{}backend:none", "backend:native,".repeat(1000));
        let lines: Vec<String> = excerpt(&long).lines().map(str::to_owned).collect();
        assert!(lines[0].chars().count() <= 120, "{lines:?}");
        assert_eq!(&lines[0][lines[1].len() - 1..], "none", "the caret stands under the word");
    }

    #[test]
    fn numbers_are_read_as_far_as_they_go() {
        for (text, read) in [
            ("0.5x", "0.5"),
            ("5.", "5."),
            (".5.5", ".5"),
            ("1e-1e", "1e-1"),
            ("1e", "1"),
            ("1e+x", "1"),
            ("-1.5", "-1.5"),
            (".", ""),
            ("+", ""),
            ("e5", ""),
            ("0.5\u{fc}", "0.5"),
            ("", ""),
        ] {
            assert_eq!(real_prefix(text), read, "{text:?}");
            assert!(read.is_empty() || read.parse::<f64>().is_ok(), "{text:?}");
        }
        assert_eq!(whole_prefix("128MB"), "128");
        assert_eq!(whole_prefix("MB"), "");
    }

    #[test]
    fn what_pytorch_refuses_is_refused() {
        for (text, position) in REFUSED {
            let error = Config::parse(text).expect_err(text);
            assert_eq!(error.position, position, "{text}: {error}");
        }
    }
}
