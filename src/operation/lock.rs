//! Locks by name and by volume. Nothing that has a lock, a thread or a hook waits for another lock:
//! the answer is "pending", at once, because the caller repeats anyway and a queue of repeats would
//! only grow. A call that has nothing yet may wait until what it needs is free.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;
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
pub struct Locks(Arc<Held>);

#[derive(Debug, Default)]
struct Held {
    keys: Mutex<HashSet<Key>>,
    /// Told of each lock that is given back.
    freed: Notify,
}

/// A taken lock; dropping it gives it back.
#[derive(Debug)]
pub struct LockGuard {
    locks: Locks,
    key: Key,
}

impl Locks {
    /// Takes a lock, or says that somebody has it.
    pub fn acquire(&self, key: Key) -> Result<LockGuard> {
        if self.held_now().insert(key.clone()) {
            Ok(LockGuard {
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
        self.held_now().contains(key)
    }

    /// Ends when nobody has any of these locks, or after this time. Takes none.
    pub async fn wait_until_free(&self, keys: &[Key], patience: Duration) {
        let free = async {
            loop {
                // Before the look, so that what is given back after it is heard of.
                let freed = self.0.freed.notified();
                if !keys.iter().any(|key| self.is_held(key)) {
                    return;
                }
                freed.await;
            }
        };
        // What is still held then is answered by the operation itself.
        let _ = timeout(patience, free).await;
    }

    fn held_now(&self) -> MutexGuard<'_, HashSet<Key>> {
        self.0.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of locks held.
    pub fn held(&self) -> usize {
        self.held_now().len()
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
        for patience in [Duration::ZERO, MOMENT] {
            locks.wait_until_free(&keys, patience).await;
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
