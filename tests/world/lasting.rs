//! What is wrong with a machine and stays so for many calls, until it's ended.

use std::path::{Path, PathBuf};

use slackwater::host::memory::Unreadable;

use super::{POOL, World};

/// What stays wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lasting {
    /// The pool is full, whatever is freed: others fill it at once.
    Full,
    /// A record on the pool can't be read.
    Unreadable(PathBuf, Unreadable),
}

impl Lasting {
    /// Whether the driver can't see all that is there.
    pub fn hides(&self) -> bool {
        !matches!(self, Lasting::Full)
    }
}

impl World {
    pub fn begin(&mut self, lasting: &Lasting) {
        self.end();
        match lasting {
            Lasting::Full => self.host.keep_full(true),
            Lasting::Unreadable(path, how) => {
                let made = self.host.make_unreadable(path, *how);
                made.expect("a record is there");
            }
        }
        self.lasting = Some(lasting.clone());
        self.remembers = true;
    }

    /// Nothing lasts any more.
    pub fn end(&mut self) {
        match self.lasting.take() {
            Some(Lasting::Full) => self.host.keep_full(false),
            Some(Lasting::Unreadable(..)) => self.host.make_readable(),
            None => {}
        }
    }

    /// The records of the pool, of its volumes and of its snapshots.
    pub fn record_files(&self) -> Vec<PathBuf> {
        let folder = Path::new(POOL);
        let files = self.host.aside(|host| host.files_below(folder));
        let files = files.iter().map(|file| folder.join(file));
        let is_record = |file: &PathBuf| {
            let below = file.strip_prefix(folder).unwrap_or(file);
            !below.starts_with("trash")
                && (below == Path::new("pool.json") || below.ends_with("record.json"))
        };
        files.filter(is_record).collect()
    }
}
