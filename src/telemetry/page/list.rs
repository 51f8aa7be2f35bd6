//! Lists of a bounded length, and the search in them.

use serde::Serialize;

use super::text::shown;

/// The longest list.
pub(super) const MAX_LISTED: usize = 20;

/// The first entries of a list.
#[derive(Clone, Debug, Serialize)]
pub struct Listed<T> {
    pub first: Vec<T>,
    /// How many there are, or how many the search has found.
    pub count: usize,
}

impl<T> Listed<T> {
    pub(super) fn of(all: impl IntoIterator<Item = T>) -> Listed<T> {
        let mut all = all.into_iter();
        let first: Vec<T> = all.by_ref().take(MAX_LISTED).collect();
        let count = first.len() + all.count();
        Listed { first, count }
    }

    /// How many are not among the first.
    pub fn hidden(&self) -> usize {
        self.count - self.first.len()
    }
}

/// The rows of the first entries alone.
pub(super) fn limited<T, R>(all: &[T], row: impl Fn(&T) -> R) -> Listed<R> {
    Listed {
        first: all.iter().take(MAX_LISTED).map(row).collect(),
        count: all.len(),
    }
}

/// What the lists are searched for: a part of a name, in any case.
pub(super) struct Search(String);

impl Search {
    pub(super) fn new(text: &str) -> Search {
        Search(shown(text.trim()).to_lowercase())
    }

    /// Everything is wanted.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether one of these texts has it, as it is shown.
    pub(super) fn finds(&self, texts: &[&str]) -> bool {
        let finds = |text: &&str| shown(text).to_lowercase().contains(&self.0);
        self.is_empty() || texts.iter().any(finds)
    }
}
