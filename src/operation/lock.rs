//! Locks by name, volume, path, snapshot and group. A call that holds a lock, a thread or a quiesce
//! hook never waits for another lock: it returns "pending" at once, because the caller retries
//! anyway and a queue of retries would only grow. A call that holds none of these may wait until
//! the locks that it needs are free.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;
use uuid::Uuid;

use crate::error::{Error, Result};

/// What is locked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Key {
    /// The request name of a volume, while it is created.
    Name(String),
    /// A volume, by the UUID in its ID.
    Volume(Uuid),
    /// A path whose volume is unknown on this node.
    Path(String),
    /// The request name of a snapshot, while it is created.
    SnapshotName(String),
    /// A snapshot, by the UUID in its ID.
    Snapshot(Uuid),
    /// A group snapshot.
    Group(Uuid),
    /// The hidden base of a volume, while another snapshot becomes it or the volume is deleted.
    Base(Uuid),
    /// The record of the pools that this node has had, while a pool is adopted or forgotten.
    NodeRecord,
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
            Key::NodeRecord => write!(f, "the record of the pools of this node"),
            Key::Base(uuid) => write!(f, "the hidden base of volume {uuid}"),
        }
    }
}

/// All locks of the driver.
#[derive(Clone, Debug, Default)]
pub struct Locks(Arc<LockTable>);

#[derive(Debug, Default)]
struct LockTable {
    /// Locks that are held, with the reason why the operation takes long, if it does.
    keys: Mutex<HashMap<Key, Option<String>>>,
    /// Notified when a lock is released.
    freed: Notify,
}

/// A lock that is held; dropping it releases the lock.
#[derive(Debug)]
pub struct LockGuard {
    locks: Locks,
    key: Key,
}

impl Locks {
    /// Acquires a lock, or returns [`Error::Pending`] if it is held.
    pub fn acquire(&self, key: Key) -> Result<LockGuard> {
        match self.held_now().entry(key.clone()) {
            Entry::Vacant(free) => {
                free.insert(None);
            }
            Entry::Occupied(held) => {
                return Err(Error::pending(match held.get() {
                    None => key.to_string(),
                    Some(why) => format!("{key} ({why})"),
                }));
            }
        }
        let locks = self.clone();
        Ok(LockGuard { locks, key })
    }

    /// Whether a lock is held now.
    pub fn is_held(&self, key: &Key) -> bool {
        self.held_now().contains_key(key)
    }

    /// Waits until none of these locks is held, or until the time is over. Acquires none of them.
    pub async fn wait_until_free(&self, keys: &[Key], max_wait: Duration) {
        let free = async {
            loop {
                // Registered before the check, so that a release after the check is not missed.
                let freed = self.0.freed.notified();
                if !keys.iter().any(|key| self.is_held(key)) {
                    return;
                }
                freed.await;
            }
        };
        // If a lock is still held, the operation itself returns the error.
        let _ = timeout(max_wait, free).await;
    }

    fn held_now(&self) -> MutexGuard<'_, HashMap<Key, Option<String>>> {
        self.0.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of locks held.
    pub fn held(&self) -> usize {
        self.held_now().len()
    }
}

impl LockGuard {
    /// Names what takes long in the errors of calls that need this lock.
    pub fn describe(&self, why: String) {
        if let Some(held) = self.locks.held_now().get_mut(&self.key) {
            *held = Some(why);
        }
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        self.locks.held_now().remove(&self.key);
        self.locks.0.freed.notify_waiters();
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
        guard.describe("its growth".into());
        let refused = locks.acquire(Key::Name("a".into())).unwrap_err();
        let said = refused.to_string();
        assert!(said.contains("name \"a\" (its growth)"), "{said}");
        drop(guard);
        assert!(locks.acquire(Key::Name("a".into())).is_ok());
        assert_eq!(locks.held(), 0);
    }

    #[tokio::test]
    async fn a_wait_ends_when_all_are_free_or_its_time_is_over() {
        const MOMENT: Duration = Duration::from_millis(20);
        let locks = Locks::default();
        let [a, b] = ["a", "b"].map(|name| Key::Name(name.into()));
        let guards = [&a, &b].map(|key| locks.acquire(key.clone()).unwrap());
        let keys = [a, b];
        for max_wait in [Duration::ZERO, MOMENT] {
            locks.wait_until_free(&keys, max_wait).await;
            assert_eq!(locks.held(), 2, "its time is over");
        }
        let waiting = locks.clone();
        let wait = tokio::spawn(async move {
            let hour = Duration::from_secs(3600);
            waiting.wait_until_free(&keys, hour).await;
            waiting.held()
        });
        for guard in guards {
            tokio::time::sleep(MOMENT).await;
            assert!(!wait.is_finished());
            drop(guard);
        }
        assert_eq!(wait.await.unwrap(), 0);
    }
}
