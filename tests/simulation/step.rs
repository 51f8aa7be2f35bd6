//! The steps of a simulation: calls of the caller, and acts of users and of the machine.

use slackwater::error::{Error, Result};
use slackwater::model::parameters::EphemeralParameters;
use slackwater::model::{
    AccessMode, AccessType, Allocation, Capability, FsType, Level, MutableParameters,
    VolumeParameters, Wipe,
};
use slackwater::operation::{
    Driver, ExpandVolume, ModifyVolume, NodeExpandVolume, PublishEphemeral, PublishVolume,
    StageVolume,
};
use slackwater::service::{Rpc, status};

use super::{LastingFault, SIZE, Simulation, create, is_thin, range, staging, target, text};

/// The parameters of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeConfig {
    /// The file system; `None` is a block volume.
    pub fs: Option<FsType>,
    pub allocation: Allocation,
    pub wipe: Wipe,
    /// Staged with the mount flag `ro`.
    pub read_only: bool,
}

impl VolumeConfig {
    pub const EXT4: VolumeConfig = VolumeConfig::fs(FsType::Ext4);
    pub const BLOCK: VolumeConfig = VolumeConfig {
        fs: None,
        ..VolumeConfig::EXT4
    };
    pub const THICK: VolumeConfig = VolumeConfig {
        allocation: Allocation::Thick,
        ..VolumeConfig::EXT4
    };

    pub const fn fs(fs: FsType) -> VolumeConfig {
        VolumeConfig {
            fs: Some(fs),
            allocation: Allocation::Thin,
            wipe: Wipe::None,
            read_only: false,
        }
    }

    /// The part that an inline volume can have: its pod chooses only its file system.
    pub const fn inline(self) -> VolumeConfig {
        VolumeConfig {
            allocation: Allocation::Thin,
            wipe: Wipe::None,
            ..self
        }
    }

    /// What the pool accepts: thin devices are not overwritten with zeros.
    pub fn of_pool(self) -> VolumeConfig {
        let wipe = match self.wipe {
            Wipe::Zero if is_thin() => Wipe::Discard,
            wipe => wipe,
        };
        VolumeConfig { wipe, ..self }
    }

    pub const fn wiped(self, wipe: Wipe) -> VolumeConfig {
        VolumeConfig { wipe, ..self }
    }

    pub fn capability(self) -> Capability {
        let access_type = match self.fs {
            None => AccessType::Block,
            Some(fs) => AccessType::Mount {
                fs_type: Some(fs),
                mount_flags: if self.read_only {
                    vec!["ro".into()]
                } else {
                    Vec::new()
                },
            },
        };
        Capability {
            access_type,
            access_mode: AccessMode::SingleNodeWriter,
        }
    }

    pub fn parameters(self) -> VolumeParameters {
        VolumeParameters {
            allocation: self.allocation,
            wipe: self.wipe,
            ..VolumeParameters::default()
        }
    }
}

/// A call of the caller, or an act of a user or the machine.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    Create(&'static str, VolumeConfig),
    Delete(&'static str),
    Modify(&'static str, Wipe),
    Expand(&'static str, u64),
    NodeExpandVolume(&'static str),
    Stage(&'static str),
    /// The same, with the capability of another kind of volume.
    StageAs(&'static str, VolumeConfig),
    Unstage(&'static str),
    Publish(&'static str, u8, bool),
    PublishAs(&'static str, u8, bool, VolumeConfig),
    Unpublish(&'static str, u8),
    PublishInline(&'static str, VolumeConfig),
    UnpublishInline(&'static str),
    /// Creates a snapshot: its name, its volume, its level.
    Snapshot(&'static str, &'static str, Level),
    DeleteSnapshot(&'static str),
    /// Creates a volume from a snapshot, with a size in bytes.
    Restore(&'static str, &'static str, VolumeConfig, u64),
    /// Creates a volume from the snapshot of another machine, with a size in bytes.
    Receive(&'static str, VolumeConfig, u64),
    /// Another driver writes an image.
    WriteForeign,
    /// Creates a volume that shares the blocks of that image, with a size in bytes.
    ImportFile(&'static str, u64),
    /// Creates a volume from a volume, with a size in bytes.
    Clone(&'static str, &'static str, VolumeConfig, u64),
    /// Gives a volume the content of one of its snapshots.
    Revert(&'static str, &'static str),
    /// The same up to the switch; then it is aborted.
    AbortRevert(&'static str, &'static str),
    Group(&'static str, &'static [&'static str]),
    DeleteGroup(&'static str),
    /// A user writes a token to the staged file system, and does not sync it.
    WriteUnsynced(&'static str, u64),
    /// From now on, the guard dies together with its process.
    GuardDies,
    /// A user writes a token to the staged file system, or to the device published as 0, and syncs
    /// it.
    Write(&'static str, u64),
    /// The process is killed and starts again.
    Start,
    Refresh,
    /// A call that is cut off because the process ends after the call's n-th effect.
    CutOff(Box<Step>, usize),
    /// The pool's disk is removed, or put back.
    PullDisk,
    PutDiskBack,
    /// A fault begins, and lasts.
    Begin(LastingFault),
    /// From now on, the kernel refuses to grow a mounted ext4.
    RefuseGrowth,
    /// The file system of a volume is left with errors that a check repairs automatically.
    LeaveUnclean(&'static str),
    /// The machine reboots without losing anything.
    Reboot,
}

impl Step {
    /// The RPC of this step.
    pub fn rpc(&self) -> Option<Rpc> {
        Some(match self {
            Step::Create(..) => Rpc::CreateVolume,
            Step::Delete(_) => Rpc::DeleteVolume,
            Step::Modify(..) | Step::Revert(..) | Step::AbortRevert(..) => {
                Rpc::ControllerModifyVolume
            }
            Step::Expand(..) => Rpc::ControllerExpandVolume,
            Step::NodeExpandVolume(_) => Rpc::NodeExpandVolume,
            Step::Stage(_) | Step::StageAs(..) => Rpc::NodeStageVolume,
            Step::Unstage(_) => Rpc::NodeUnstageVolume,
            Step::Publish(..) | Step::PublishAs(..) | Step::PublishInline(..) => {
                Rpc::NodePublishVolume
            }
            Step::Unpublish(..) | Step::UnpublishInline(_) => Rpc::NodeUnpublishVolume,
            Step::Snapshot(..) => Rpc::CreateSnapshot,
            Step::DeleteSnapshot(_) => Rpc::DeleteSnapshot,
            Step::Restore(..) | Step::Receive(..) | Step::ImportFile(..) | Step::Clone(..) => {
                Rpc::CreateVolume
            }
            Step::Group(..) => Rpc::CreateVolumeGroupSnapshot,
            Step::DeleteGroup(_) => Rpc::DeleteVolumeGroupSnapshot,
            Step::Write(..)
            | Step::WriteUnsynced(..)
            | Step::WriteForeign
            | Step::GuardDies
            | Step::Start
            | Step::Refresh
            | Step::CutOff(..)
            | Step::PullDisk
            | Step::PutDiskBack
            | Step::Begin(_)
            | Step::RefuseGrowth
            | Step::LeaveUnclean(_)
            | Step::Reboot => return None,
        })
    }

    /// Whether the step removes something, which must be possible on a full pool.
    pub fn is_undoing(&self) -> bool {
        matches!(
            self,
            Step::Delete(_)
                | Step::Unstage(_)
                | Step::Unpublish(..)
                | Step::UnpublishInline(_)
                | Step::DeleteSnapshot(_)
                | Step::DeleteGroup(_)
        )
    }

    /// Whether the step needs only the mount table, and therefore works without the pool's disk.
    pub fn is_unmounting(&self) -> bool {
        matches!(
            self,
            Step::Unstage(_) | Step::Unpublish(..) | Step::UnpublishInline(_)
        )
    }

    /// Whether the caller forgets the object after this error.
    pub fn is_final(&self, error: &Error) -> bool {
        use tonic::Code::{Aborted, Cancelled, DeadlineExceeded, Unavailable};
        let code = self.rpc().map(|rpc| status::code(rpc, error));
        code.is_some_and(|code| {
            !matches!(code, Aborted | Cancelled | DeadlineExceeded | Unavailable)
        })
    }
}

impl Simulation {
    /// Makes a call to a driver.
    pub fn call(&self, driver: &Driver, step: &Step) -> Result<String> {
        let done = |()| String::from("done");
        match step {
            Step::Create(name, config) => driver
                .volumes
                .create_volume(&create(name, *config))
                .map(|volume| format!("{volume:?}")),
            Step::Delete(name) => driver.volumes.delete_volume(&self.id(name)).map(done),
            Step::Modify(name, wipe) => driver
                .volumes
                .modify_volume(&ModifyVolume {
                    volume_id: self.id(name),
                    mutable: MutableParameters { wipe: Some(*wipe) },
                })
                .map(done),
            Step::Expand(name, size) => driver
                .volumes
                .expand_volume(&ExpandVolume {
                    volume_id: self.id(name),
                    capacity: range(*size),
                    capability: None,
                })
                .map(|expanded| format!("{expanded:?}")),
            Step::Refresh => {
                driver.refresh_pools();
                self.clean()?;
                self.serving()
            }
            Step::Snapshot(..)
            | Step::DeleteSnapshot(_)
            | Step::Restore(..)
            | Step::Receive(..)
            | Step::ImportFile(..)
            | Step::Clone(..)
            | Step::Revert(..)
            | Step::AbortRevert(..)
            | Step::Group(..)
            | Step::DeleteGroup(_) => self.call_cut(driver, step),
            _ => self.call_node(driver, step),
        }
    }

    fn call_node(&self, driver: &Driver, step: &Step) -> Result<String> {
        let done = |()| String::from("done");
        match step {
            Step::NodeExpandVolume(name) => driver
                .volumes
                .expand_node(&NodeExpandVolume {
                    volume_id: self.id(name),
                    volume_path: text(&staging(name)),
                    capacity: None,
                    capability: None,
                })
                .map(|size| size.to_string()),
            Step::Stage(name) => self.call_node(driver, &Step::StageAs(name, self.config(name))),
            Step::StageAs(name, config) => driver
                .volumes
                .stage_volume(&StageVolume {
                    volume_id: self.id(name),
                    staging_path: text(&staging(name)),
                    capability: config.capability(),
                })
                .map(done),
            Step::Unstage(name) => driver
                .volumes
                .unstage_volume(&self.id(name), &text(&staging(name)))
                .map(done),
            Step::Publish(name, n, read_only) => {
                let step = Step::PublishAs(name, *n, *read_only, self.config(name));
                self.call_node(driver, &step)
            }
            Step::PublishAs(name, n, read_only, config) => driver
                .volumes
                .publish_volume(&PublishVolume {
                    volume_id: self.id(name),
                    staging_path: text(&staging(name)),
                    target_path: text(&target(name, *n)),
                    capability: config.capability(),
                    read_only: *read_only,
                })
                .map(done),
            Step::Unpublish(name, n) => driver
                .volumes
                .unpublish_volume(&self.id(name), &text(&target(name, *n)))
                .map(done),
            Step::PublishInline(name, config) => driver
                .volumes
                .publish_ephemeral(&PublishEphemeral {
                    volume_id: name.to_string(),
                    target_path: text(&target(name, 0)),
                    capability: config.capability(),
                    read_only: false,
                    attributes: EphemeralParameters {
                        size: SIZE,
                        other: None,
                    },
                })
                .map(done),
            Step::UnpublishInline(name) => driver
                .volumes
                .unpublish_volume(name, &text(&target(name, 0)))
                .map(done),
            other => panic!("{other:?} is not a call of the node"),
        }
    }
}
