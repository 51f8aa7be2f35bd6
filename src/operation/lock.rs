//! Locks by name and by volume. A taken lock is never waited for: the answer is "pending", at
//! once, because the caller repeats anyway and a queue of repeats would only grow.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use uuid::Uuid;

use crate::error::{Error, Result};

/// What is locked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    /// A request name, during create.
    Name(String),
    /// A volume, by the part of its id that is its own.
    Volume(Uuid),
    /// A path whose volume isn't known here.
    Path(String),
    /// A request name of a snapshot, during create.
    SnapshotName(String),
    /// A snapshot, by the part of its id that is its own.
    Snapshot(Uuid),
    /// A group of snapshots.
    Group(Uuid),
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Key::Name(name) => write!(f, "name {name:?}"),
            Key::Volume(uuid) => write!(f, "volume {uuid}"),
            Key::Path(path) => write!(f, "path {path:?}"),
            Key::SnapshotName(name) => write!(f, "snapshot name {name:?}"),
            Key::Snapshot(uuid) => write!(f, "snapshot {uuid}"),
            Key::Group(uuid) => write!(f, "group snapshot {uuid}"),
        }
    }
}

/// All locks of the driver.
#[derive(Clone, Debug, Default)]
pub struct Locks(Arc<Mutex<HashSet<Key>>>);

/// A taken lock; dropping it gives it back.
#[derive(Debug)]
pub struct Guard {
    locks: Locks,
    key: Key,
}

impl Locks {
    /// Takes a lock, or says that somebody has it.
    pub fn acquire(&self, key: Key) -> Result<Guard> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if held.insert(key.clone()) {
            Ok(Guard {
                locks: self.clone(),
                key,
            })
        } else {
            Err(Error::Pending {
                what: key.to_string(),
            })
        }
    }

    /// Whether somebody has a lock now.
    pub fn is_held(&self, key: &Key) -> bool {
        let held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        held.contains(key)
    }

    /// Number of locks held.
    pub fn held(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.locks
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_lock_is_pending_until_it_is_given_back() {
        let locks = Locks::default();
        let guard = locks.acquire(Key::Name("a".into())).unwrap();
        assert!(matches!(
            locks.acquire(Key::Name("a".into())),
            Err(Error::Pending { .. })
        ));
        assert!(locks.acquire(Key::Path("a".into())).is_ok());
        drop(guard);
        assert!(locks.acquire(Key::Name("a".into())).is_ok());
        assert_eq!(locks.held(), 0);
    }
}
