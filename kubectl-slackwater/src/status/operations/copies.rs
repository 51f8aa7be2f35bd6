//! The volumes that operations copy. A running copy adds its bytes to the operation that it is a part
//! of; any other copy is an operation by itself.

use std::collections::BTreeMap;

use super::{Inputs, Operation};
use crate::cluster::Scope;
use crate::cluster::object;
use crate::model::running_copy::RunningCopy;
use crate::model::{Pool, Volume};

/// A volume that an operation copies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CopiedVolume {
    volume: String,
    /// Its bytes are still to be copied if no copy runs.
    is_waiting: bool,
}

impl CopiedVolume {
    pub fn of(volume: &str, is_waiting: bool) -> CopiedVolume {
        CopiedVolume {
            volume: volume.into(),
            is_waiting,
        }
    }
}

/// Adds copies to the operations that they are parts of, and the others as operations by themselves.
pub fn merge_copies(mut work: Vec<Operation>, scope: &Scope, parts: &Inputs<'_>) -> Vec<Operation> {
    let mut copies = BTreeMap::<&str, Vec<(&Pool, &RunningCopy)>>::new();
    let pools = parts.pools.into_iter().flatten();
    for pool in pools.filter(|pool| !matches!(pool.health.as_str(), "Lost" | "Forgotten")) {
        for copy in &pool.copies {
            copies.entry(&copy.id).or_default().push((pool, copy));
        }
    }
    let volumes = parts.volumes.iter();
    let volumes: BTreeMap<&str, &Volume> = volumes.map(|it| (it.handle.as_str(), it)).collect();
    for one in &mut work {
        add(one, &mut copies, &volumes);
    }
    let others = copies.into_values().flatten();
    let others = others.filter_map(|(pool, copy)| {
        let volume = volumes.get(copy.id.as_str());
        let volume = volume.filter(|volume| !volume.claim.is_empty());
        // A new volume has no PersistentVolume yet, and then only the report of its agent has the claim.
        let claim = match volume {
            Some(volume) => format!("{}/{}", volume.namespace, volume.claim),
            None => copy.claim.clone(),
        };
        let namespace = claim.split_once('/').map(|(namespace, _)| namespace);
        let is_seen = match scope {
            Scope::All => true,
            Scope::Namespace(own) => namespace == Some(own),
        };
        is_seen.then(|| operation_of_copy(pool, copy, &claim))
    });
    work.extend(others);
    work
}

/// Adds the copies of its volumes to an operation. Without a copy that runs, it keeps the numbers of its object.
fn add(
    work: &mut Operation,
    copies: &mut BTreeMap<&str, Vec<(&Pool, &RunningCopy)>>,
    volumes: &BTreeMap<&str, &Volume>,
) {
    let (mut running, mut others) = (Vec::new(), Vec::new());
    for part in &work.parts {
        match copies.remove(part.volume.as_str()) {
            Some(copies) => running.extend(copies.into_iter().map(|(_, copy)| copy)),
            None => others.push(part.clone()),
        }
    }
    if running.is_empty() {
        return;
    }
    let (mut done, mut before, mut total) = (0i64, 0i64, Some(0i64));
    for part in others {
        let size = volumes.get(part.volume.as_str());
        let size = size.map_or(0, |volume| volume.size_bytes);
        total = total.map(|total| total.saturating_add(size));
        if !part.is_waiting {
            done = done.saturating_add(size);
            before = before.saturating_add(size);
        }
    }
    for copy in &running {
        done = done.saturating_add(copy.done);
        before = before.saturating_add(copy.before);
        total = total.zip(copy.total).map(|(a, b)| a.saturating_add(b));
    }
    let since = running.iter().filter_map(|copy| copy.since).min();
    work.bytes_done = done;
    work.bytes_total = total.unwrap_or(0);
    work.rate = since.map(|since| (since, before));
    work.reported_at = running.iter().filter_map(|copy| copy.reported).min();
}

fn operation_of_copy(pool: &Pool, copy: &RunningCopy, claim: &str) -> Operation {
    Operation {
        resource: object::POOL.plural,
        is_copy: true,
        name: pool.id.clone(),
        what: copy.what(claim),
        phase: "Copying".into(),
        since: copy.since,
        reported_at: copy.reported,
        bytes_done: copy.done,
        bytes_total: copy.total.unwrap_or(0),
        rate: copy.since.map(|since| (since, copy.before)),
        pools: vec![pool.id.clone()],
        ..Operation::default()
    }
}

#[cfg(test)]
mod tests;
