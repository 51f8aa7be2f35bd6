//! Paths in messages.

use std::path::Path;

/// A path without what a terminal does not show as it is. A name in an imported directory can have any
/// bytes, also commands for the terminal.
pub(super) fn printable(path: &Path) -> String {
    let text = path.to_string_lossy();
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\'' | '"' => shown.push(c),
            _ => shown.extend(c.escape_debug()),
        }
    }
    shown
}
