//! The thin pool of LVM that the demo uses if one is given. It must never have been used, and is given
//! back as it was.

use std::path::Path;

use super::{Failed, Result};
use crate::backend::place::lvm;
use crate::backend::thin::{DEVICE_PREFIX, TRANSACTION_ID};
use crate::error::{HostError, chain};
use crate::host::{Effect, Host, ThinMessage};
use crate::model::size::{HumanBytes, MIB};
use crate::model::{PoolDefinition, ThinPoolName};
use crate::record::{self, NodeRecord};

/// Records, data and metadata of the demo's volumes and snapshots.
const NEEDED_BYTES: u64 = 768 * MIB;

pub(super) struct ThinPool {
    name: ThinPoolName,
    definition: PoolDefinition,
    /// The demo has found it unused.
    is_taken: bool,
}

impl ThinPool {
    pub(super) fn new(name: &ThinPoolName) -> Result<ThinPool> {
        let definition = definition(name);
        let definition = definition.parse::<PoolDefinition>();
        Ok(ThinPool {
            definition: definition.map_err(|error| Failed::new("demo", error))?,
            name: name.clone(),
            is_taken: false,
        })
    }

    /// The definition with which the driver is started.
    pub(super) fn definition(&self) -> String {
        definition(&self.name)
    }

    /// Checks that the pool was never used. The driver takes it afterwards.
    pub(super) fn take(&mut self, host: &dyn Host) -> Result<String> {
        let (name, doing) = (&self.name, "check the thin pool");
        let status = lvm::usable(host, &self.definition, name);
        let status = status.map_err(|error| Failed::new(doing, chain(&error)))?;
        let used = match status.transaction_id {
            0 => lvm::find_previous_use(host, &status, name.mapped()),
            id => Ok(Some(format!("its transaction ID is {id}"))),
        };
        let used = used.map_err(|error| Failed::new(doing, chain(&error)))?;
        let problem = match used {
            Some(found) => Some(format!("was used before: {found}")),
            None => {
                let is_small = status.data.total < NEEDED_BYTES;
                is_small.then(|| format!("has {}", HumanBytes(status.data.total)))
            }
        };
        if let Some(problem) = problem {
            let advice = format!(
                "{name} {problem}; give one of at least {} that was never used: lvcreate --type thin-pool --size SIZE --name NAME {}",
                HumanBytes(NEEDED_BYTES),
                name.group()
            );
            return Err(Failed::new(doing, advice));
        }
        self.is_taken = true;
        Ok(format!("{} of {name}", HumanBytes(status.data.total)))
    }

    /// Deletes all thin devices, and gives up the claim. The driver has ended, and nothing is mounted. A
    /// pool whose header does not have the home in the driver's node record is left as it is: another
    /// program has taken it since it was checked.
    pub(super) fn give_back(&self, host: &dyn Host, node_record: &Path) {
        if !self.is_taken {
            return;
        }
        let home = record::load::<NodeRecord>(host, node_record);
        let home = home.ok().flatten().and_then(|node| node.home);
        let header = lvm::identify(host, &self.name).ok().flatten();
        if home.is_none() || header.map(|header| header.home) != home {
            tracing::debug!(pool = %self.name, "the thin pool is not one of the demo");
            return;
        }
        if let Err(error) = lvm::release(host, &self.definition) {
            tracing::debug!(error = %chain(&error), "failed to release the thin pool of the demo");
        }
        if let Err(error) = self.empty(host) {
            tracing::debug!(error = %chain(&error), "failed to empty the thin pool of the demo");
        }
    }

    fn empty(&self, host: &dyn Host) -> Result<(), HostError> {
        let pool = self.name.mapped();
        for device in host.mapped_devices(pool, DEVICE_PREFIX)? {
            let uuid = &device.uuid;
            host.perform(&Effect::RemoveMapped { uuid })?;
        }
        let send = |message| host.perform(&Effect::ThinMessage { pool, message });
        for id in host.thin_devices(pool)?.into_keys() {
            send(ThinMessage::Delete { id })?;
        }
        let status = host.thin_pool(pool)?;
        if status.is_some_and(|status| status.transaction_id == TRANSACTION_ID) {
            let (from, to) = (TRANSACTION_ID, 0);
            send(ThinMessage::SetTransactionId { from, to })?;
        }
        Ok(())
    }

    /// What of the demo is still in the pool.
    pub(super) fn leaks(&self, host: &dyn Host) -> Vec<String> {
        if !self.is_taken {
            return Vec::new();
        }
        match host.thin_pool(self.name.mapped()) {
            Ok(Some(status)) if status.transaction_id == 0 && status.data.used == 0 => Vec::new(),
            Ok(_) => vec![format!("the claim or data in {}", self.name)],
            Err(error) => vec![format!("unknown, in {}: {}", self.name, chain(&error))],
        }
    }
}

fn definition(name: &ThinPoolName) -> String {
    format!("demo=lvm:{name},init,overcommit=16,rawBlock=unfiltered")
}
