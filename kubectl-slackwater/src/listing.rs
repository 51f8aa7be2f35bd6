//! Output of lists: as a table for people, and as JSON, YAML or names for programs.

pub mod watch;

use std::io::Write;

use serde_json::{Value, json};

use crate::cli::Format;
use crate::cluster::Scope;
use crate::failure::{Failure, Result};
use crate::text::{escaped, escaped_json};

/// A column of a table.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    pub name: &'static str,
    /// It is only in the format `wide`.
    pub is_wide: bool,
}

/// A column of each table.
pub const fn column(name: &'static str) -> Column {
    Column {
        name,
        is_wide: false,
    }
}

/// A column of wide tables.
pub const fn wide_column(name: &'static str) -> Column {
    Column {
        name,
        is_wide: true,
    }
}

/// One line of a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Kind and name, as kubectl prints them.
    pub name: String,
    /// One text for each column.
    pub cells: Vec<String>,
    /// The same for programs.
    pub value: Value,
}

#[derive(Debug)]
pub struct Listing {
    /// What is listed, for an empty list.
    pub what: String,
    pub columns: Vec<Column>,
    /// The lines.
    pub rows: Vec<Row>,
    /// What could not be shown.
    pub notes: Vec<String>,
}

impl Listing {
    /// A list of objects that are in namespaces. It has the column NAMESPACE if it is of all of them.
    pub fn namespaced(
        what: String,
        columns: &[Column],
        mut rows: Vec<Row>,
        (scope, notes): (&Scope, Vec<String>),
    ) -> Listing {
        let mut columns = columns.to_vec();
        if *scope == Scope::All {
            columns.insert(0, column("NAMESPACE"));
            for row in &mut rows {
                let namespace = row.value["namespace"].as_str().unwrap_or_default();
                row.cells.insert(0, namespace.into());
            }
        }
        Listing {
            what,
            columns,
            rows,
            notes,
        }
    }

    /// The text on stdout. An empty table is no text, as of kubectl: a line on stderr reports it.
    pub fn render(&self, format: Format, headers: bool) -> Result<String> {
        match format {
            Format::Table | Format::Wide if self.rows.is_empty() => Ok(String::new()),
            Format::Table | Format::Wide => {
                let rows: Vec<_> = self.rows.iter().map(|row| row.cells.as_slice()).collect();
                Ok(table(&self.columns, &rows, format == Format::Wide, headers))
            }
            Format::Name => {
                let names = self.rows.iter().map(|row| escaped(&row.name) + "\n");
                Ok(names.collect())
            }
            Format::Json | Format::Yaml => {
                let items: Vec<_> = self.rows.iter().map(|row| &row.value).collect();
                serialize(format, &json!({ "items": items, "notes": self.notes }))
            }
        }
    }

    /// The lines on stderr.
    pub fn remarks(&self, format: Format) -> Vec<String> {
        let mut remarks = note_lines(&self.notes);
        if self.rows.is_empty() && matches!(format, Format::Table | Format::Wide) {
            remarks.push(format!("No {} found.", self.what));
        }
        remarks
    }
}

/// Notes as lines on stderr.
pub fn note_lines(notes: &[String]) -> Vec<String> {
    notes
        .iter()
        .map(|note| format!("note: {}", escaped(note)))
        .collect()
}

/// A value for programs.
pub fn serialize(format: Format, value: &Value) -> Result<String> {
    let failed = |error: &dyn std::fmt::Display| Failure::failed(format!("printing: {error}"));
    if format == Format::Yaml {
        return serde_saphyr::to_string(value).map_err(|error| failed(&error));
    }
    let json = serde_json::to_string_pretty(value).map_err(|error| failed(&error))?;
    Ok(escaped_json(&json) + "\n")
}

/// Prints text on stdout, and remarks on stderr. A reader that is gone needs neither.
pub fn print(text: &str, remarks: &[String]) {
    let mut out = std::io::stdout().lock();
    if out
        .write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .is_err()
    {
        std::process::exit(0);
    }
    for remark in remarks {
        eprintln!("{remark}");
    }
}

/// A table: columns are as wide as their widest text, and three spaces apart.
pub fn table(columns: &[Column], rows: &[&[String]], is_wide: bool, headers: bool) -> String {
    let shown: Vec<usize> = (0..columns.len())
        .filter(|n| is_wide || !columns[*n].is_wide)
        .collect();
    let head = columns.iter().map(|column| column.name.to_string());
    let head: Vec<String> = head.collect();
    let mut lines: Vec<Vec<String>> = Vec::new();
    let heads = headers.then_some(head.as_slice());
    for row in heads.into_iter().chain(rows.iter().copied()) {
        let text = |n: &usize| match row.get(*n).map(|text| escaped(text)) {
            Some(text) if !text.is_empty() => text,
            _ => "-".into(),
        };
        lines.push(shown.iter().map(text).collect());
    }
    let widths: Vec<usize> = (0..shown.len())
        .map(|n| lines.iter().map(|line| line[n].chars().count()).max())
        .map(Option::unwrap_or_default)
        .collect();
    let mut all = String::new();
    for line in lines {
        let padded = line.iter().zip(&widths);
        let padded = padded.map(|(text, width)| format!("{text:width$}"));
        let text = padded.collect::<Vec<_>>().join("   ");
        all.push_str(text.trim_end());
        all.push('\n');
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing() -> Listing {
        let row = |name: &str, size: &str| Row {
            name: format!("thing/{name}"),
            cells: vec![name.into(), size.into(), "more".into()],
            value: json!({ "name": name }),
        };
        Listing {
            what: "things".into(),
            columns: vec![column("NAME"), column("SIZE"), wide_column("MORE")],
            rows: vec![row("a", "1 GiB"), row("\u{1b}[31mlong\u{9b}", "")],
            notes: vec!["x\u{1b} is not shown".into()],
        }
    }

    #[test]
    fn columns_are_aligned_and_text_of_objects_is_escaped() {
        let listing = listing();
        let text = listing.render(Format::Table, true).unwrap();
        let expected = "NAME                   SIZE\n\
                        a                      1 GiB\n\
                        \\u{1b}[31mlong\\u{9b}   -\n";
        assert_eq!(text, expected);
        let text = listing.render(Format::Wide, false).unwrap();
        assert_eq!(text.lines().count(), 2);
        assert!(text.ends_with("-       more\n"), "{text}");
        assert_eq!(
            listing.remarks(Format::Table),
            ["note: x\\u{1b} is not shown"]
        );
    }

    #[test]
    fn no_format_prints_a_control_character() {
        for format in [
            Format::Table,
            Format::Wide,
            Format::Json,
            Format::Yaml,
            Format::Name,
        ] {
            let text = listing().render(format, true).unwrap();
            let hidden = text
                .chars()
                .find(|c| *c != '\n' && crate::text::is_hidden(*c));
            assert_eq!(hidden, None, "{format:?}: {text:?}");
        }
    }

    #[test]
    fn an_empty_table_is_a_remark() {
        let empty = Listing {
            rows: Vec::new(),
            notes: Vec::new(),
            ..listing()
        };
        let remarks = empty.remarks(Format::Wide);
        assert_eq!(remarks, ["No things found."]);
        assert_eq!(empty.render(Format::Table, true).unwrap(), "");
        assert!(empty.remarks(Format::Json).is_empty());
        assert_eq!(
            empty.render(Format::Json, true).unwrap(),
            "{\n  \"items\": [],\n  \"notes\": []\n}\n"
        );
    }
}
