//! Tables of a page: what each cell shows, what it sorts by, and what stands under the pointer.

use super::escaped;
use crate::report::text::{SizeUnit, duration, grouped, percent};
use crate::units::Bytes;

/// A cell of a table: what is shown, what it sorts by, and what stands under the pointer.
pub(super) struct Entry {
    pub(super) text: String,
    pub(super) value: String,
    pub(super) title: String,
}

impl Entry {
    pub(super) fn text(text: &str) -> Entry {
        Entry { text: escaped(text), value: String::new(), title: String::new() }
    }

    pub(super) fn count(count: u64) -> Entry {
        Entry { text: grouped(count), value: count.to_string(), title: String::new() }
    }

    pub(super) fn bytes(unit: SizeUnit, bytes: u64) -> Entry {
        let title = format!("{} bytes", grouped(bytes));
        Entry { text: unit.cell(bytes), value: bytes.to_string(), title }
    }

    /// With a unit of its own.
    pub(super) fn size(bytes: u64) -> Entry {
        let title = format!("{} bytes", grouped(bytes));
        Entry { text: Bytes(bytes).to_string(), value: bytes.to_string(), title }
    }

    pub(super) fn share(share: f64) -> Entry {
        Entry { text: percent(share), value: share.to_string(), title: String::new() }
    }

    pub(super) fn time(ns: u64) -> Entry {
        Entry { text: duration(ns), value: ns.to_string(), title: format!("{} ns", grouped(ns)) }
    }

    /// Nothing to say.
    pub(super) fn none() -> Entry {
        Entry { text: "-".to_owned(), value: "-".to_owned(), title: String::new() }
    }

    pub(super) fn maybe<T>(value: Option<T>, entry: impl FnOnce(T) -> Entry) -> Entry {
        value.map_or_else(Entry::none, entry)
    }

    fn is_told(&self) -> bool {
        self.text != "-"
    }

    fn html(&self, class: &str) -> String {
        let attribute = |name: &str, value: &str| match value {
            "" => String::new(),
            value => format!(" {name}=\"{value}\""),
        };
        format!(
            "<td{}{}{}>{}</td>",
            attribute("class", class),
            attribute("data-v", &self.value),
            attribute("title", &self.title),
            self.text
        )
    }
}

/// Heads and the class of their columns.
pub(super) type Heads<'a> = [(&'a str, &'a str)];

pub(super) fn table_head(heads: &Heads<'_>, caption: &str) -> String {
    let cells: String = heads
        .iter()
        .map(|(text, class)| match *class {
            "" => format!("<th scope=\"col\">{text}</th>"),
            class => format!("<th scope=\"col\" class=\"{class}\">{text}</th>"),
        })
        .collect();
    format!(
        "<table class=\"sortable\">\n<caption class=\"sr\">{caption}</caption>\n\
         <thead><tr>{cells}</tr></thead>\n<tbody>\n"
    )
}

pub(super) fn table_row(heads: &Heads<'_>, entries: &[Entry], attributes: &str) -> String {
    let cells: String =
        entries.iter().zip(heads).map(|(entry, (_, class))| entry.html(class)).collect();
    format!("<tr{attributes}>{cells}</tr>\n")
}

/// A table without the columns in which no row says anything.
pub(super) fn table(heads: &Heads<'_>, mut rows: Vec<Vec<Entry>>, caption: &str) -> String {
    let told: Vec<bool> = (0..heads.len())
        .map(|column| rows.iter().any(|row| row.get(column).is_some_and(Entry::is_told)))
        .collect();
    let heads: Vec<(&str, &str)> =
        heads.iter().zip(&told).filter(|(_, told)| **told).map(|(head, _)| *head).collect();
    let mut out = table_head(&heads, caption);
    for row in &mut rows {
        let mut told = told.iter();
        row.retain(|_| told.next().copied().unwrap_or(false));
        out.push_str(&table_row(&heads, row, ""));
    }
    out.push_str("</tbody></table>");
    out
}
