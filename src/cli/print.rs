//! Output of commands: tables for users, JSON for programs.

use std::io::Write;

use serde::Serialize;

/// Prints a line. If the reader has closed the pipe, that is not an error.
pub(super) fn line(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Prints a value as JSON.
pub(super) fn json(value: &impl Serialize) {
    match serde_json::to_string_pretty(value) {
        Ok(text) => line(text),
        Err(error) => eprintln!(
            "slackwater: internal error (please report it): cannot serialize the result as JSON: {error}"
        ),
    }
}

/// Prints rows in columns below a header.
pub(super) fn table<const N: usize>(head: [&str; N], rows: &[[String; N]]) {
    line(render(head, rows));
}

fn render<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> String {
    let head = head.map(str::to_string);
    let all = || std::iter::once(&head).chain(rows);
    let width = |column: usize| {
        let longest = all().map(|row| row[column].chars().count()).max();
        longest.unwrap_or_default()
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let lines: Vec<String> = all()
        .map(|row| {
            let cells = row.iter().zip(widths);
            let text: String = cells
                .map(|(cell, width)| format!("{cell:width$}  "))
                .collect();
            text.trim_end().to_string()
        })
        .collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_longest_cell() {
        let rows = [
            ["a".to_string(), "long cell".to_string()],
            ["bcdefgh".to_string(), String::new()],
        ];
        assert_eq!(
            render(["NAME", "X"], &rows),
            "NAME     X\na        long cell\nbcdefgh"
        );
    }
}
