//! Where raw block volumes are staged: one entry for each in the state directory. The entries are
//! not on the pool, so that a pool that is full, dead or gone does not prevent a pod from
//! terminating.
//!
//! Earlier releases recorded the stage on the pool, in the volume's record. If such a stage was
//! recorded in this boot, it still counts, unless an entry here was written later in this boot; an
//! entry may also say "not staged".

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::backend::place::make;
use crate::error::{ErrorContext, Result, chain};
use crate::host::Effect;
use crate::model::AccessType;
use crate::operation::{Pool, Usage};
use crate::record::{self, LastStage, Record, VolumeRecord};

/// An entry. It is valid for one boot, like staging paths.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct BlockStage {
    boot: Uuid,
    /// `None` if the volume is not staged, regardless of its record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stage: Option<LastStage>,
}

impl Record for BlockStage {
    const VERSION: u32 = 1;
    const WHAT: &'static str = "record of a staged block volume";
}

impl Usage {
    fn stages(&self) -> PathBuf {
        self.pools.settings.state_dir.join("staged")
    }

    fn stage_file(&self, uuid: Uuid) -> PathBuf {
        self.stages().join(format!("{uuid}.json"))
    }

    fn boot(&self) -> Result<Uuid> {
        self.host.boot_id().context(|| "read the boot ID".into())
    }

    fn entry(&self, uuid: Uuid) -> Result<Option<BlockStage>> {
        record::load(self.host.as_ref(), &self.stage_file(uuid))
    }

    fn store_entry(&self, uuid: Uuid, stage: Option<LastStage>) -> Result<()> {
        let boot = self.boot()?;
        make::make_folders(self.host.as_ref(), &self.stages())?;
        let entry = BlockStage { boot, stage };
        record::store(self.host.as_ref(), &self.stage_file(uuid), &entry)
    }

    fn remove_entry(&self, uuid: Uuid) -> Result<()> {
        let path = &self.stage_file(uuid);
        self.host
            .perform(&Effect::RemoveFile { path })
            .map(drop)
            .context(|| format!("remove {}", path.display()))
    }

    /// How a block volume is staged in this boot.
    pub(in crate::operation) fn block_stage(
        &self,
        record: &VolumeRecord,
    ) -> Result<Option<LastStage>> {
        let boot = self.boot()?;
        match self.entry(record.uuid)? {
            Some(entry) if entry.boot == boot => Ok(entry.stage),
            Some(_) | None => Ok(stage_on_pool(record, boot)),
        }
    }

    /// Records the stage of a block volume. The volume's record already marks it as a block volume.
    pub(in crate::operation) fn begin_block_stage(
        &self,
        pool: &Pool,
        mut record: VolumeRecord,
        stage: LastStage,
    ) -> Result<()> {
        let boot = self.boot()?;
        let stage = LastStage {
            boot: Some(boot),
            ..stage
        };
        self.store_entry(record.uuid, Some(stage))?;
        if stage_on_pool(&record, boot).is_some() {
            record.last_stage = None;
            clear(pool, &record);
        }
        Ok(())
    }

    /// Ends the stage at a path if it is the stage of a block volume; also without the pool.
    pub(in crate::operation) fn unstage_block(
        &self,
        pool: Option<&Pool>,
        uuid: Uuid,
        path: &str,
    ) -> Result<()> {
        let boot = self.boot()?;
        let entry = self.entry(uuid);
        let staged = match &entry {
            Ok(Some(entry)) if entry.boot == boot => entry.stage.as_ref(),
            Ok(_) | Err(_) => None,
        };
        if staged.is_some_and(|stage| stage.staging_path != path) {
            return Ok(());
        }
        // A record that cannot be read may contain a stage.
        let read = pool.map(|pool| (pool, pool.backend.volumes.get(uuid)));
        let cleared = match read {
            Some((pool, Ok(Some(mut record)))) => {
                let there = stage_on_pool(&record, boot);
                let ends = |stage: LastStage| staged.is_some() || stage.staging_path == path;
                !there.is_some_and(ends) || {
                    record.last_stage = None;
                    clear(pool, &record)
                }
            }
            Some((_, Ok(None))) => true,
            Some((_, Err(_))) | None => false,
        };
        if !matches!(entry, Ok(None)) {
            self.remove_entry(uuid)?;
        }
        if cleared {
            return Ok(());
        }
        match self.store_entry(uuid, None) {
            // It is very unlikely that this is a block volume that an earlier release has staged.
            Err(error) if matches!(entry, Ok(None)) && pool.is_none() => {
                tracing::warn!(volume = %uuid, error = %chain(&error), "failed to record that the volume is not staged");
                Ok(())
            }
            stored => stored,
        }
    }

    /// Removes the entries of earlier boots.
    pub(in crate::operation) fn forget_earlier_stages(&self) -> Result<()> {
        let boot = self.boot()?;
        let names = self.host.list_dir(&self.stages());
        let names = names.context(|| "list staged block volumes".into())?;
        for name in names.unwrap_or_default() {
            let Some(Ok(uuid)) = name.strip_suffix(".json").map(Uuid::try_parse) else {
                continue;
            };
            if self.entry(uuid)?.is_some_and(|entry| entry.boot != boot) {
                self.remove_entry(uuid)?;
            }
        }
        Ok(())
    }

    /// Where a block volume is staged in this boot.
    pub(in crate::operation) fn staged_as_block(
        &self,
        record: &VolumeRecord,
    ) -> Result<Option<String>> {
        let stage = self.block_stage(record)?;
        Ok(stage.map(|stage| stage.staging_path))
    }
}

/// The stage that an earlier release recorded on the pool.
fn stage_on_pool(record: &VolumeRecord, boot: Uuid) -> Option<LastStage> {
    let is_block = |stage: &&LastStage| {
        stage.boot == Some(boot) && stage.capability.access_type == AccessType::Block
    };
    record.last_stage.as_ref().filter(is_block).cloned()
}

/// Removes the stage from a record, if the pool has space for the write.
fn clear(pool: &Pool, record: &VolumeRecord) -> bool {
    let cleared = pool.backend.update(record);
    if let Err(error) = &cleared {
        tracing::warn!(volume = %record.uuid, error = %chain(error), "failed to remove staging data of an earlier release from the record, ignoring it");
    }
    cleared.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::host::memory::MemoryHost;
    use crate::model::VolumeId;
    use crate::operation::tests::{self, block, volume};
    use crate::operation::{Driver, StageVolume};
    use crate::record::{formats, fuzz};

    const STAGING: &str = "/var/lib/kubelet/staging";

    /// A volume that an earlier release staged in this boot, or in an earlier one.
    fn staged_on_pool(this_boot: bool) -> (MemoryHost, Driver, String) {
        let host = MemoryHost::new();
        let driver = tests::driver(&host.restart_process());
        let id = volume(&driver, "v").to_string();
        stage(&driver, &id).unwrap();
        driver.volumes.unstage_volume(&id, STAGING).unwrap();
        let (pool, _, mut record) = driver.pools.get_volume(&id).unwrap();
        let boot = driver.usage.boot().unwrap();
        record.last_stage = Some(LastStage {
            staging_path: STAGING.into(),
            capability: block(),
            boot: Some(if this_boot { boot } else { Uuid::from_u128(1) }),
        });
        pool.backend.update(&record).unwrap();
        (host, driver, id)
    }

    fn stage(driver: &Driver, id: &str) -> Result<()> {
        driver.volumes.stage_volume(&StageVolume {
            volume_id: id.into(),
            staging_path: STAGING.into(),
            capability: block(),
        })
    }

    fn on_pool(driver: &Driver, id: &str) -> Option<LastStage> {
        driver.pools.get_volume(id).unwrap().2.last_stage
    }

    #[test]
    fn a_stage_of_an_earlier_release_counts_in_its_boot() {
        let (_, driver, id) = staged_on_pool(true);
        assert!(matches!(
            driver.volumes.delete_volume(&id),
            Err(Error::InUse { .. })
        ));
        driver
            .volumes
            .unstage_volume(&id, "/var/lib/kubelet/elsewhere")
            .unwrap();
        assert!(
            on_pool(&driver, &id).is_some(),
            "it is staged at another path"
        );
        driver.volumes.unstage_volume(&id, STAGING).unwrap();
        assert_eq!(on_pool(&driver, &id), None);
        driver.volumes.delete_volume(&id).unwrap();
        let (_, driver, id) = staged_on_pool(false);
        driver.volumes.delete_volume(&id).unwrap();
    }

    #[test]
    fn a_stage_of_an_earlier_release_ends_on_a_full_pool_as_well() {
        let (host, driver, id) = staged_on_pool(true);
        host.keep_full(true);
        driver.volumes.unstage_volume(&id, STAGING).unwrap();
        assert!(
            on_pool(&driver, &id).is_some(),
            "the pool is too full to record it"
        );
        stage(&driver, &id).unwrap();
        assert!(matches!(
            driver.volumes.delete_volume(&id),
            Err(Error::InUse { .. })
        ));
        driver.volumes.unstage_volume(&id, STAGING).unwrap();
        // The next process reads the same state.
        drop(driver);
        let driver = tests::driver(&host.restart_process());
        driver.volumes.delete_volume(&id).unwrap();
    }

    #[test]
    fn an_entry_ends_with_its_boot() {
        let (host, driver, id) = staged_on_pool(false);
        stage(&driver, &id).unwrap();
        let uuid = id.parse::<VolumeId>().unwrap().uuid;
        assert!(driver.usage.entry(uuid).unwrap().is_some());
        let host = host.reboot(false);
        let driver = tests::driver(&host.restart_process());
        assert_eq!(driver.usage.entry(uuid).unwrap(), None);
        driver.volumes.delete_volume(&id).unwrap();
    }

    #[test]
    fn a_stage_ends_without_its_pool() {
        let (host, driver, id) = staged_on_pool(true);
        host.kill_disk(std::path::Path::new("/memory/default"))
            .unwrap();
        drop(driver);
        let driver = tests::driver(&host.restart_process());
        driver.volumes.unstage_volume(&id, STAGING).unwrap();
        let uuid = id.parse::<VolumeId>().unwrap().uuid;
        let entry = driver.usage.entry(uuid).unwrap().unwrap();
        assert_eq!(
            entry.stage, None,
            "it is not staged, whatever the pool says"
        );
    }

    #[test]
    fn entries_of_staged_block_volumes_keep_their_format() {
        let boot = Uuid::from_u128(1);
        let stage = Some(LastStage {
            staging_path: STAGING.into(),
            capability: block(),
            boot: Some(boot),
        });
        let expected = vec![
            ("staged.json", BlockStage { boot, stage }),
            ("not-staged.json", BlockStage { boot, stage: None }),
        ];
        formats::check("block-stage", expected);
    }

    #[test]
    fn fuzz_entries_of_staged_block_volumes() {
        let is_elsewhere = |stage: &LastStage| stage.staging_path.len() > STAGING.len();
        fuzz::records::<BlockStage>("block-stage", |entry| {
            entry.stage.as_ref().is_some_and(is_elsewhere)
        });
    }
}
