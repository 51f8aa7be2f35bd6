//! Limits the running cuts with hooks by namespace, so that one tenant cannot block all others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};

/// Number of running cuts by namespace.
pub(super) type Held = Arc<Mutex<BTreeMap<String, usize>>>;

/// Maximum number of cuts of one namespace whose applications are quiesced at a time: half of the
/// calls that csi-snapshotter makes at once, so that slow hooks of one namespace do not block all
/// others.
const MAX_HOOK_CUTS_OF_NAMESPACE: usize = 5;

/// A cut with hooks, counted for its namespaces until this is dropped.
pub(super) struct HookCutPermit {
    held: Held,
    namespaces: BTreeSet<String>,
}

impl HookCutPermit {
    /// Counts one more cut, or fails with an error to retry later.
    pub(super) fn admit(held: &Held, namespaces: BTreeSet<String>) -> Result<HookCutPermit> {
        let mut counts = held.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = |name: &&String| {
            counts
                .get(*name)
                .is_some_and(|n| *n >= MAX_HOOK_CUTS_OF_NAMESPACE)
        };
        if let Some(full) = namespaces.iter().find(is_full) {
            return Err(Error::pending(format!(
                "{MAX_HOOK_CUTS_OF_NAMESPACE} other snapshots with hooks of namespace {full}"
            )));
        }
        for name in &namespaces {
            *counts.entry(name.clone()).or_default() += 1;
        }
        drop(counts);
        let held = held.clone();
        Ok(HookCutPermit { held, namespaces })
    }
}

impl Drop for HookCutPermit {
    fn drop(&mut self) {
        let mut counts = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        for name in &self.namespaces {
            if let Some(count) = counts.get_mut(name) {
                *count -= 1;
            }
        }
        counts.retain(|_, count| *count > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hooks_of_one_namespace_leave_room_for_those_of_others() {
        let held = Arc::default();
        let of = |names: &[&str]| {
            HookCutPermit::admit(&held, names.iter().map(|n| n.to_string()).collect())
        };
        let slow: Vec<_> = (0..MAX_HOOK_CUTS_OF_NAMESPACE)
            .map(|_| of(&["shop"]).unwrap())
            .collect();
        for names in [["shop"].as_slice(), &["bank", "shop"]] {
            assert!(matches!(of(names), Err(Error::Pending { .. })), "{names:?}");
        }
        of(&["bank"]).unwrap();
        // Without a known PVC there is no limit.
        of(&[]).unwrap();
        drop(slow);
        of(&["shop"]).unwrap();
        assert!(held.lock().unwrap().is_empty());
    }
}
