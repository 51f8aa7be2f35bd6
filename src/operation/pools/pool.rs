//! The types of pools: served ones, and refused ones with the reason.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use uuid::Uuid;

use crate::backend::place::OpenPlace;
use crate::backend::place::pool_fs::PoolFs;
use crate::backend::{Leftovers, PoolBackend, PoolKind};
use crate::error::Result;
use crate::model::id::NameKind;
use crate::model::{PoolDefinition, PoolId, PoolPlace, SnapshotSpacePolicy, VolumeId};
use crate::operation::blocking::count_read;

/// A pool that is served.
pub struct Pool {
    /// As configured.
    pub definition: PoolDefinition,
    /// Its storage.
    pub backend: PoolBackend,
    /// What must stay open for its folder.
    pub place: Option<OpenPlace>,
    /// The file system on which the pool lies.
    pub pool_fs: PoolFs,
    /// What was cleaned up when the pool was opened.
    pub leftovers: Leftovers,
    /// The device number (st_dev) of the file system that its folder is on.
    pub device: u64,
}

impl Pool {
    pub fn id(&self) -> PoolId {
        self.backend.record.id
    }

    /// Counts this pool for the operation of this thread, if that is of
    /// [`WorkClass::Read`](crate::operation::WorkClass::Read). An error if too many such operations have not
    /// finished on this pool.
    pub(in crate::operation) fn count_read(&self) -> Result<()> {
        count_read(self.id(), &self.definition.name)
    }

    /// The UUID of the inline volume of this name on this pool.
    pub(in crate::operation) fn ephemeral_uuid(&self, name: &str) -> Uuid {
        VolumeId::of_name(self.id(), NameKind::Ephemeral, name).uuid
    }

    /// Volumes and snapshots whose records cannot be read.
    pub(in crate::operation) fn damaged(&self) -> Vec<(Uuid, String)> {
        let mut damaged = self.backend.volumes.damaged();
        damaged.extend(self.backend.snapshots.damaged());
        damaged
    }

    /// Whether snapshots may take space that is guaranteed to volumes: the value of the definition,
    /// or else the value with which the pool was created.
    pub fn snapshots(&self) -> SnapshotSpacePolicy {
        let said = self.definition.snapshots;
        said.or(self.backend.record.snapshots)
            .unwrap_or(SnapshotSpacePolicy::BestEffort)
    }
}

/// A configured pool.
#[derive(Clone)]
pub enum ServingState {
    Serving(Arc<Pool>),
    /// Not served now. The driver tries again in the background.
    Refused {
        /// As configured.
        definition: Box<PoolDefinition>,
        /// Its ID, if it is known.
        id: Option<PoolId>,
        /// Why, and what an administrator can do.
        why: String,
        /// What was found at its place.
        presence: Presence,
        /// Its earlier state, if this process has served it.
        was: Option<Arc<Former>>,
    },
}

/// What was found at the place of a pool that is not served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    /// It is not known.
    #[default]
    Unknown,
    /// This machine had the pool there, and it is not there now.
    Absent,
    /// The pool, which belongs to another home.
    OtherHome,
}

impl ServingState {
    /// A pool that is not served, and that this process has not served before.
    pub(in crate::operation) fn refused(
        definition: &PoolDefinition,
        id: Option<PoolId>,
        why: String,
    ) -> ServingState {
        ServingState::Refused {
            definition: Box::new(definition.clone()),
            id,
            why,
            presence: Presence::Unknown,
            was: None,
        }
    }

    /// The same, with what was found at the place of a pool that is not served.
    pub(in crate::operation) fn with(mut self, found: Presence) -> ServingState {
        if let ServingState::Refused { presence, .. } = &mut self {
            *presence = found;
        }
        self
    }

    /// As configured.
    pub fn definition(&self) -> &PoolDefinition {
        match self {
            ServingState::Serving(pool) => &pool.definition,
            ServingState::Refused { definition, .. } => definition,
        }
    }
}

/// A pool that this process has served until its disk failed.
#[derive(Debug)]
pub struct Former {
    /// Exists for as long as an operation on it has not finished.
    pub(in crate::operation) pool: Weak<Pool>,
    /// The device number (st_dev) of the file system that it was on.
    pub(in crate::operation) device: u64,
    /// The folders of its volumes.
    pub(in crate::operation) volumes: HashSet<String>,
}

/// How the pool of a definition stores images.
pub(in crate::operation) fn pool_kind(definition: &PoolDefinition) -> PoolKind<'_> {
    match &definition.place {
        PoolPlace::Lvm { pool } => PoolKind::Thin {
            pool: pool.mapped(),
        },
        PoolPlace::Memory { thin: true } => PoolKind::Thin {
            pool: &definition.name,
        },
        PoolPlace::Memory { thin: false } | PoolPlace::File { .. } => PoolKind::File {
            extent: definition.extent,
        },
    }
}

/// The names of the directories of all volumes of a pool, without access to its disk.
pub(in crate::operation) fn folders(backend: &PoolBackend) -> HashSet<String> {
    let all = backend.volumes.all().into_iter();
    all.map(|uuid| uuid.to_string()).collect()
}
