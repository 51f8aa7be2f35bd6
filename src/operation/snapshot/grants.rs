//! The tickets of this node, and the readers of its snapshots.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

use super::remote::Ticket;
use crate::error::{Error, Result};

/// How long a ticket is valid. It is checked when a reader begins.
pub(super) const TICKET_SECONDS: u64 = 3600;
/// Maximum number of readers at the same time.
const MAX_READERS: usize = 8;
/// Maximum number of readers of one node, so that a node that reads slowly leaves some to the others.
const MAX_READERS_OF_NODE: usize = 4;
/// Maximum number of valid tickets: one for each reader and snapshot.
const MAX_TICKETS: usize = 10_000;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Grant {
    pub(super) snapshot_id: String,
    pub(super) identity: u64,
    pub(super) reader: String,
    /// The identities and the IDs of snapshots; differences to them may be read.
    pub(super) bases: Vec<(u64, String)>,
    /// Seconds since 1970.
    pub(super) until: u64,
}

/// The snapshots that a reader needs, and its node.
#[derive(Clone, Debug, PartialEq)]
struct Reading {
    snapshots: Vec<Uuid>,
    node: String,
}

#[derive(Debug, Default)]
struct State {
    tickets: HashMap<Ticket, Grant>,
    readers: Vec<Reading>,
    /// Snapshots that are being deleted.
    deleting: HashSet<Uuid>,
}

/// The tickets and the readers of this node.
#[derive(Clone, Debug, Default)]
pub(in crate::operation) struct Grants(Arc<Mutex<State>>);

impl Grants {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A ticket for this grant. A valid one is used again, because a call that is repeated while a
    /// copy runs asks for one each time.
    pub(super) fn grant(
        &self,
        grant: Grant,
        now: u64,
        new: impl FnOnce() -> Ticket,
    ) -> Result<Ticket> {
        let mut state = self.state();
        state.tickets.retain(|_, had| now < had.until);
        let same = |had: &Grant| {
            let until = grant.until;
            let had = Grant {
                until,
                ..had.clone()
            };
            had == grant
        };
        // One that is about to end would not reach its reader in time.
        let fresh = |had: &Grant| had.until >= now + TICKET_SECONDS / 2;
        let mut had = state.tickets.iter();
        if let Some((ticket, _)) = had.find(|(_, had)| same(had) && fresh(had)) {
            return Ok(*ticket);
        }
        if state.tickets.len() >= MAX_TICKETS {
            return Err(Error::pending(format!("{MAX_TICKETS} other copies")));
        }
        let ticket = new();
        state.tickets.insert(ticket, grant);
        Ok(ticket)
    }

    pub(super) fn find(
        &self,
        ticket: &Ticket,
        now: u64,
        is_reader: &dyn Fn(&str) -> bool,
    ) -> Option<Grant> {
        let state = self.state();
        let grant = state.tickets.get(ticket)?;
        (now < grant.until && is_reader(&grant.reader)).then(|| grant.clone())
    }

    pub(super) fn readers(&self) -> usize {
        self.state().readers.len()
    }

    pub(super) fn read_snapshots(&self) -> Vec<String> {
        let state = self.state();
        let each = state.readers.iter().flat_map(|one| &one.snapshots);
        each.map(ToString::to_string).collect()
    }

    pub(super) fn begin_read(&self, snapshots: Vec<Uuid>, node: &str) -> Result<Reader> {
        let mut state = self.state();
        let mut each = snapshots.iter();
        if let Some(snapshot) = each.find(|uuid| state.deleting.contains(*uuid)) {
            return Err(Error::pending(format!("snapshot {snapshot}")));
        }
        if state.readers.len() >= MAX_READERS {
            let what = format!("{MAX_READERS} copies to other nodes (the limit of this node)");
            return Err(Error::pending(what));
        }
        let of_node = state.readers.iter().filter(|one| one.node == node);
        if of_node.count() >= MAX_READERS_OF_NODE {
            let what =
                format!("{MAX_READERS_OF_NODE} copies to node {node} (the limit for one node)");
            return Err(Error::pending(what));
        }
        let reading = Reading {
            snapshots,
            node: node.to_string(),
        };
        state.readers.push(reading.clone());
        Ok(Reader {
            grants: self.clone(),
            reading,
        })
    }

    /// Refuses the deletion of snapshots that are being read. None of them is read until the result
    /// is dropped.
    pub(in crate::operation) fn begin_delete(
        &self,
        snapshots: impl IntoIterator<Item = Uuid>,
    ) -> Result<Deleting> {
        let mut state = self.state();
        let snapshots: Vec<Uuid> = snapshots.into_iter().collect();
        let reader = |uuid: &Uuid| state.readers.iter().find(|it| it.snapshots.contains(uuid));
        let mut read = snapshots
            .iter()
            .filter_map(|uuid| Some((uuid, reader(uuid)?)));
        if let Some((uuid, Reading { node, .. })) = read.next() {
            let why = format!("is being copied to node {node}; it can be deleted after that");
            return Err(Error::refused(format!("snapshot {uuid}"), why));
        }
        // The caller has the locks of these snapshots, so nothing else is deleting them.
        state.deleting.extend(&snapshots);
        Ok(Deleting {
            grants: self.clone(),
            snapshots,
        })
    }
}

/// A reader of snapshots, until it is dropped.
pub(super) struct Reader {
    grants: Grants,
    reading: Reading,
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut state = self.grants.state();
        if let Some(at) = state.readers.iter().position(|one| *one == self.reading) {
            state.readers.swap_remove(at);
        }
    }
}

/// Snapshots that are being deleted, until it is dropped.
pub(in crate::operation) struct Deleting {
    grants: Grants,
    snapshots: Vec<Uuid>,
}

impl Drop for Deleting {
    fn drop(&mut self) {
        let mut state = self.grants.state();
        for snapshot in &self.snapshots {
            state.deleting.remove(snapshot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_node_leaves_readers_to_the_others() {
        let grants = Grants::default();
        let read = |node: &str| grants.begin_read(vec![Uuid::from_u128(1)], node);
        let slow: Vec<_> = (0..MAX_READERS_OF_NODE).map(|_| read("slow")).collect();
        assert!(slow.iter().all(Result::is_ok));
        let refused = read("slow").err().unwrap().to_string();
        assert!(refused.contains("node slow"), "{refused}");
        let others = MAX_READERS - MAX_READERS_OF_NODE;
        let others: Vec<_> = (0..others).map(|_| read("other").unwrap()).collect();
        let refused = read("third").err().unwrap().to_string();
        assert!(refused.contains("limit of this node"), "{refused}");
        drop(slow);
        assert!(read("third").is_ok());
        drop(others);
        assert_eq!(grants.readers(), 0);
    }
}
