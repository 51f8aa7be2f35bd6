//! The page as HTML. Its template escapes every value.

use askama::Template;

use super::view::View;

/// The only style of the page.
pub(super) const STYLE: &str = include_str!("status.css");
/// Its icon. Browsers request one in any case, and log that it is missing.
pub(super) const ICON: &str = include_str!("icon.svg");

#[derive(Template)]
#[template(path = "status.html", config = "src/telemetry/page/askama.toml")]
struct Page<'a> {
    view: &'a View,
}

/// The page of a view.
pub(super) fn render(view: &View) -> Result<String, String> {
    Page { view }.render().map_err(|error| error.to_string())
}
