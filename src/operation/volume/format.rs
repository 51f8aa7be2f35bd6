//! A volume is never formatted twice: the record says "begun" before mkfs starts and "complete"
//! before the first mount, so mkfs runs only on a volume that was never in use.

use std::sync::atomic::Ordering;

use uuid::Uuid;

use crate::backend::Attached;
use crate::error::{Error, ErrorContext, Result};
use crate::host::{Effect, Signature};
use crate::model::{AccessType, Allocation, Capability, FsType, mkfs};
use crate::operation::Volumes;
use crate::operation::pools::pool::Pool;
use crate::record::{Formatted, FormattedAs, LastStage, VolumeRecord};

/// What to do with a device before it is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Plan {
    /// Run mkfs: the volume was never in use.
    Format(Uuid),
    /// Mount the existing file system.
    Keep,
}

impl Volumes {
    /// Runs mkfs if and only if the volume was never in use, and records the stage.
    pub(in crate::operation) fn format_once(
        &self,
        pool: &Pool,
        record: &mut VolumeRecord,
        attached: &Attached,
        fs: FsType,
        stage: LastStage,
    ) -> Result<()> {
        let device = &attached.device;
        let signature = self
            .host
            .signature(device)
            .context(|| format!("probe volume {}", record.uuid))?;
        let fresh = self.host.random_uuid();
        match plan(record, &signature, fs, fresh)? {
            Plan::Format(uuid) => {
                record.formatted = Some(Formatted::begun(fs.into(), uuid));
                pool.backend.update(record)?;
                let keep_blocks = record.allocation == Allocation::Thick;
                let (options, _) = mkfs::without_error_policy(fs, &record.mkfs_options);
                let effect = Effect::Format {
                    device,
                    fs,
                    uuid,
                    options: &options,
                    keep_blocks,
                };
                self.host
                    .perform(&effect)
                    .context(|| format!("format volume {} as {fs}", record.uuid))?;
                self.formats.fetch_add(1, Ordering::Relaxed);
                record.formatted = Some(Formatted::complete(fs.into(), uuid));
            }
            Plan::Keep if record.last_stage.as_ref() == Some(&stage) => return Ok(()),
            Plan::Keep => {}
        }
        record.last_stage = Some(stage);
        pool.backend.update(record)
    }
}

/// The file system that a capability requests; if it names none, the one that the volume has, or
/// was created for.
pub(in crate::operation) fn wanted_fs(
    record: &VolumeRecord,
    capability: &Capability,
) -> Option<FsType> {
    match &capability.access_type {
        AccessType::Block => None,
        AccessType::Mount {
            fs_type: Some(fs), ..
        } => Some(*fs),
        AccessType::Mount { fs_type: None, .. } => {
            let made_as = record
                .formatted
                .as_ref()
                .and_then(|formatted| formatted.kind.fs());
            let asked = record
                .capabilities
                .iter()
                .find_map(|capability| capability.access_type.fs());
            Some(made_as.or(asked).unwrap_or(FsType::Ext4))
        }
    }
}

/// Decides whether mkfs runs. The record takes precedence over the device: a volume whose format
/// was ever complete is never formatted again, even if its device reads as blank.
fn plan(record: &VolumeRecord, signature: &Signature, fs: FsType, fresh: Uuid) -> Result<Plan> {
    let refuse = |reason: String| Err(Error::refused(format!("volume {}", record.uuid), reason));
    match (&record.formatted, signature) {
        (None, Signature::None) => Ok(Plan::Format(fresh)),
        (None, found) => refuse(format!(
            "this driver never formatted it, but {} was found on it; it is left unchanged",
            name(found)
        )),
        // mkfs was interrupted; the file system that it left was never mounted.
        (
            Some(Formatted {
                complete: false, ..
            }),
            _,
        ) => Ok(Plan::Format(fresh)),
        (Some(formatted), _) if formatted.kind != FormattedAs::from(fs) => refuse(format!(
            "it is formatted as {}, but {fs} was requested",
            formatted.kind.as_str()
        )),
        (Some(_), Signature::Fs { name, .. }) if name == fs.name() => Ok(Plan::Keep),
        (Some(formatted), found) => refuse(format!(
            "it was formatted as {}, but {} was found on it; it is never formatted again, so repair or restore it",
            formatted.kind.as_str(),
            name(found)
        )),
    }
}

fn name(signature: &Signature) -> String {
    match signature {
        Signature::None => "nothing".into(),
        Signature::Fs { name, .. } => name.clone(),
        Signature::Other(what) => what.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(formatted: Option<Formatted>) -> VolumeRecord {
        VolumeRecord {
            uuid: Uuid::nil(),
            name: "v".into(),
            incarnation: Uuid::nil(),
            state: crate::record::VolumeState::Ready,
            size: 1 << 30,
            allocation: Allocation::Thin,
            block_size: 512,
            asked_block_size: None,
            mkfs_options: Vec::new(),
            wipe: Default::default(),
            created_wipe: Default::default(),
            block_groups: true,
            capabilities: Vec::new(),
            formatted,
            ephemeral: false,
            last_stage: None,
            created_at: 0,
            content_source: None,
            claim: None,
            copy: None,
            growth: None,
            lineage: None,
            image: 0,
            fenced: None,
            lifted: None,
            imported: None,
            foreign_bytes: None,
            reverting: None,
            reverted: None,
            spare: None,
        }
    }

    fn signatures() -> impl Strategy<Value = Signature> {
        let fs = |name: &'static str| Signature::Fs {
            name: name.into(),
            uuid: "u".into(),
            size: None,
            beside: None,
        };
        prop_oneof![
            Just(Signature::None),
            Just(Signature::Other("a partition table".into())),
            Just(fs("ext4")),
            Just(fs("xfs")),
            Just(fs("btrfs")),
            Just(fs("ntfs")),
        ]
    }

    fn kinds() -> impl Strategy<Value = FormattedAs> {
        prop_oneof![
            Just(FormattedAs::Raw),
            Just(FormattedAs::Ext4),
            Just(FormattedAs::Xfs),
            Just(FormattedAs::Btrfs)
        ]
    }

    proptest! {
        #[test]
        fn what_was_ever_complete_is_never_formatted_again(kind in kinds(), found in signatures(), fs in prop_oneof![Just(FsType::Ext4), Just(FsType::Xfs), Just(FsType::Btrfs)]) {
            let formatted = Formatted::complete(kind, Uuid::nil());
            let planned = plan(&record(Some(formatted)), &found, fs, Uuid::max());
            prop_assert!(!matches!(planned, Ok(Plan::Format(_))));
            let same = kind == FormattedAs::from(fs) && matches!(&found, Signature::Fs { name, .. } if name == fs.name());
            prop_assert_eq!(planned.is_ok(), same);
        }

        #[test]
        fn a_stray_signature_on_a_fresh_volume_is_never_overwritten(found in signatures()) {
            let planned = plan(&record(None), &found, FsType::Ext4, Uuid::max());
            prop_assert_eq!(matches!(planned, Ok(Plan::Format(_))), found == Signature::None);
        }
    }

    #[test]
    fn a_mkfs_that_was_cut_off_is_run_again() {
        let begun = Formatted::begun(FormattedAs::Xfs, Uuid::nil());
        let half = Signature::Other("garbage".into());
        assert!(matches!(
            plan(&record(Some(begun)), &half, FsType::Xfs, Uuid::max()),
            Ok(Plan::Format(_))
        ));
    }
}
