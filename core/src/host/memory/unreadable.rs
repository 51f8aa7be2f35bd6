//! Files of a simulated machine whose content cannot be read.

/// How reading the content of a file fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// Reading it fails with EIO.
    Error,
    /// Reading returns zeros instead of the content.
    Zeros,
}

/// A file that can't be read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flawed {
    pub(super) how: Unreadable,
    /// Number of reads that succeed before.
    pub(super) reads: usize,
    /// A process that replaces it cannot have read it.
    pub(super) is_hidden: bool,
}

impl Flawed {
    /// How one more read fails, if it does.
    pub(super) fn read(&mut self) -> Option<Unreadable> {
        if self.reads > 0 {
            self.reads -= 1;
            return None;
        }
        self.is_hidden = true;
        Some(self.how)
    }
}
