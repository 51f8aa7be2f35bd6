//! What a PersistentVolume of a volume has to contain, for volumes that no object names any more.

use crate::error::{Error, Kind, Result};
use crate::model::{FsType, VolumeId};
use crate::operation::Volumes;
use crate::record::VolumeRecord;

/// As many volumes are described at a time.
pub const MAX_DESCRIBED: usize = 1000;

/// How a volume can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescribedVolume {
    pub id: VolumeId,
    /// Its size in bytes, as requested.
    pub size: u64,
    /// Its file system, or the one that it gets at its first use; `None` if it is a raw block device.
    pub fs: Option<FsType>,
    /// It was created for many readers, and is never written.
    pub is_for_readers: bool,
    /// "namespace/name" of the claim for which it was created, if that is known.
    pub claim: Option<String>,
    /// Why no pod can use it now.
    pub problem: Option<String>,
}

impl Volumes {
    /// Those of the volumes that exist and are complete. An error if one of their pools cannot be read.
    pub fn describe_volumes(&self, ids: &[String]) -> Result<Vec<DescribedVolume>> {
        let mut found = Vec::new();
        for volume_id in ids {
            match self.pools.get_volume_even_if_fenced(volume_id) {
                Ok((_, id, record)) => found.push(described(id, &record)),
                Err(Error::NotFound {
                    kind: Kind::Volume, ..
                }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }
}

fn described(id: VolumeId, record: &VolumeRecord) -> DescribedVolume {
    DescribedVolume {
        id,
        size: record.size,
        fs: fs(record),
        is_for_readers: record.is_for_readers(),
        claim: record.claim.clone(),
        problem: problem(record),
    }
}

/// A volume that was never used has no content yet, and gets the one for which it was created.
fn fs(record: &VolumeRecord) -> Option<FsType> {
    match &record.formatted {
        Some(formatted) => formatted.kind.fs(),
        None => {
            let mut requested = record.capabilities.iter();
            requested.find_map(|one| one.access_type.fs())
        }
    }
}

fn problem(record: &VolumeRecord) -> Option<String> {
    if record.ephemeral {
        return Some("it is an inline volume, which is deleted with its pod".into());
    }
    if let Some(revert) = &record.reverting {
        return Some(format!("VolumeRevert {} replaces its content", revert.name));
    }
    let move_uid = record.fenced?;
    Some(format!(
        "the VolumeMove with UID {move_uid} has fenced it: its data may be in use at another place"
    ))
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::host::memory::MemoryHost;
    use crate::model::{AccessMode, AccessType, Capability};
    use crate::operation::tests::{driver, ext4, new_volume};
    use crate::operation::{ContentSource, CreateVolume, StageVolume};

    fn volume(driver: &crate::operation::Driver, name: &str, more: CreateVolume) -> VolumeId {
        let request = CreateVolume {
            name: name.into(),
            ..more
        };
        driver.volumes.create_volume(&request).unwrap().id
    }

    fn mounted(fs_type: FsType) -> Capability {
        Capability {
            access_type: AccessType::Mount {
                fs_type: Some(fs_type),
                mount_flags: Vec::new(),
            },
            access_mode: AccessMode::SingleNodeWriter,
        }
    }

    #[test]
    fn a_volume_is_described_by_its_record() {
        let driver = driver(&MemoryHost::new());
        let volumes = &driver.volumes;
        let raw = volume(&driver, "raw", new_volume("raw"));
        let mut request = new_volume("new");
        request.capabilities = vec![mounted(FsType::Xfs)];
        request.parameters.claim = Some("shop/data".into());
        let new = volume(&driver, "new", request);
        let mut request = new_volume("used");
        request.capabilities = vec![ext4()];
        let used = volume(&driver, "used", request.clone());
        let stage = StageVolume {
            volume_id: used.to_string(),
            staging_path: "/var/lib/kubelet/staging".into(),
            capability: ext4(),
        };
        volumes.stage_volume(&stage).unwrap();
        let readers = Capability {
            access_mode: AccessMode::MultiNodeReaderOnly,
            ..ext4()
        };
        request.capabilities = vec![readers];
        request.content_source = Some(ContentSource::Volume(used.to_string()));
        let copy = volume(&driver, "copy", request);
        let absent = VolumeId {
            uuid: Uuid::from_u128(7),
            ..raw
        };
        let ids = [raw, absent, new, used, copy].map(|id| id.to_string());
        let found = volumes.describe_volumes(&ids).unwrap();
        let each = found.iter();
        let each = each.map(|one| (one.id, one.fs, one.is_for_readers, one.claim.as_deref()));
        assert_eq!(
            each.collect::<Vec<_>>(),
            [
                (raw, None, false, None),
                (new, Some(FsType::Xfs), false, Some("shop/data")),
                (used, Some(FsType::Ext4), false, None),
                (copy, Some(FsType::Ext4), true, None),
            ]
        );
        let is_whole = |one: &DescribedVolume| one.size == 1 << 30 && one.problem.is_none();
        assert!(found.iter().all(is_whole), "{found:?}");
    }

    #[test]
    fn a_volume_that_a_move_has_fenced_has_a_problem() {
        let driver = driver(&MemoryHost::new());
        let id = volume(&driver, "v", new_volume("v"));
        let move_uid = Uuid::from_u128(9);
        let volumes = &driver.volumes;
        volumes.fence_volume(&id.to_string(), move_uid).unwrap();
        let found = volumes.describe_volumes(&[id.to_string()]).unwrap();
        let problem = found[0].problem.as_deref().unwrap();
        assert!(problem.contains(&move_uid.to_string()), "{problem}");
        let wrong = volumes.describe_volumes(&["x".into()]);
        assert_eq!(wrong.unwrap(), []);
    }
}
