//! Limits of how much the guard holds at a time: its memory is locked and bounded, and each session
//! and each file system in one needs a thread.
//!
//! The guard counts what it holds, and refuses more. The driver also counts by namespace before it
//! asks the guard, because only the driver knows the namespace of a volume (from its PVC), and all
//! cuts of a node pass through it, whichever router coordinates them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of file systems in all sessions. Each needs some 100 KiB (its stack, and what the
/// kernel keeps for a thread), which leaves space for the program itself in the 64 MiB of its
/// container.
pub const MAX_HELD: usize = 256;
/// Maximum number of file systems of one namespace, so that others can always cut.
pub const MAX_HELD_OF_NAMESPACE: usize = MAX_HELD / 2;
/// Maximum number of sessions.
pub const MAX_SESSIONS: usize = 64;

/// What is held now.
#[derive(Clone, Debug, Default)]
pub struct Load(Arc<Mutex<Held>>);

#[derive(Debug, Default)]
struct Held {
    sessions: usize,
    members: usize,
    by_namespace: BTreeMap<String, usize>,
}

/// A session that was admitted; it is counted until this is dropped.
#[derive(Debug)]
pub struct Admitted {
    load: Load,
    members: usize,
    by_namespace: BTreeMap<String, usize>,
}

impl Load {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a session with members of these namespaces, as far as they are known; the error is
    /// the reason of a refusal.
    pub fn admit(&self, namespaces: &[Option<String>]) -> Result<Admitted, String> {
        let mut by_namespace: BTreeMap<String, usize> = BTreeMap::new();
        for namespace in namespaces.iter().flatten() {
            *by_namespace.entry(namespace.clone()).or_default() += 1;
        }
        let members = namespaces.len();
        let mut held = self.held();
        if held.sessions >= MAX_SESSIONS || held.members + members > MAX_HELD {
            return Err(format!(
                "the freeze guard, which holds {} file systems in {} cuts; the limit is {MAX_HELD} in {MAX_SESSIONS}",
                held.members, held.sessions
            ));
        }
        for (namespace, more) in &by_namespace {
            let has = held.by_namespace.get(namespace).copied().unwrap_or(0);
            if has + more > MAX_HELD_OF_NAMESPACE {
                return Err(format!(
                    "the freeze guard, which holds {has} file systems of namespace {namespace}; the limit is {MAX_HELD_OF_NAMESPACE} of one namespace"
                ));
            }
        }
        held.sessions += 1;
        held.members += members;
        for (namespace, more) in &by_namespace {
            *held.by_namespace.entry(namespace.clone()).or_default() += more;
        }
        drop(held);
        Ok(Admitted {
            load: self.clone(),
            members,
            by_namespace,
        })
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut held = self.load.held();
        held.sessions -= 1;
        held.members -= self.members;
        for (namespace, less) in &self.by_namespace {
            if let Some(has) = held.by_namespace.get_mut(namespace) {
                *has -= less;
            }
        }
        held.by_namespace.retain(|_, has| *has > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(namespace: &str, members: usize) -> Vec<Option<String>> {
        vec![Some(namespace.to_string()); members]
    }

    #[test]
    fn no_namespace_takes_more_than_half_and_all_together_no_more_than_there_is() {
        let load = Load::default();
        let shop = load.admit(&of("shop", MAX_HELD_OF_NAMESPACE)).unwrap();
        let refused = load.admit(&of("shop", 1)).unwrap_err();
        assert!(
            refused.contains("128 file systems of namespace shop"),
            "{refused}"
        );
        let bank = load.admit(&of("bank", MAX_HELD_OF_NAMESPACE - 1)).unwrap();
        let refused = load.admit(&[None, None]).unwrap_err();
        assert!(
            refused.contains("holds 255 file systems in 2 cuts"),
            "{refused}"
        );
        let last = load.admit(&[None]).unwrap();
        assert!(load.admit(&[None]).is_err());
        drop((shop, bank, last));
        assert!(load.held().by_namespace.is_empty());
        let sessions: Vec<_> = (0..MAX_SESSIONS)
            .map(|_| load.admit(&[None]).unwrap())
            .collect();
        assert!(load.admit(&[None]).is_err());
        drop(sessions);
        // Without known namespaces, there is no limit per namespace.
        load.admit(&vec![None; MAX_HELD]).unwrap();
    }
}
