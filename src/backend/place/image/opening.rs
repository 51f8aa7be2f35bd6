//! The steps of opening a pool's image. Each step accepts that it was done before a crash.

use crate::backend::place::image::IMAGE_FILE;
use crate::backend::place::image::MOUNT_POINT;
use crate::backend::place::image::on;
use crate::backend::place::image::stat_image;
use crate::backend::place::make::IMAGE_RECORD;
use crate::backend::place::make::check_image_pool_fs;
use crate::backend::place::pool_fs::is_of_machine;
use crate::backend::place::pool_fs::machine_reserve;
use crate::backend::place::{FoundMount, find_mount};
use crate::error::Error;
use crate::error::ErrorContext;
use crate::error::Result;
use crate::error::chain;
use crate::host::Device;
use crate::host::Effect;
use crate::host::FileStat;
use crate::host::Host;
use crate::host::LoopHold;
use crate::host::LoopSpec;
use crate::host::LoopStatus;
use crate::host::MountSpec;
use crate::host::Signature;
use crate::host::attach_loop;
use crate::model::FsType;
use crate::model::PoolDefinition;
use crate::model::size::HumanBytes;
use crate::record;
use crate::record::Formatted;
use crate::record::FormattedAs;
use crate::record::ImageRecord;
use std::path::Path;
use std::path::PathBuf;

/// Bytes that stay free next to an image that is created or grown: for the records, and for the
/// extent maps of the reserved blocks.
const IMAGE_HEADROOM_BYTES: u64 = 64 << 20;

/// No file on it is a program or a device node of this machine, and no program reads access times.
const OPTIONS: [&str; 4] = ["nosuid", "nodev", "noexec", "noatime"];

/// The opening of one image.
pub(super) struct ImageOpener<'a> {
    pub(super) host: &'a dyn Host,
    pub(super) pool: &'a PoolDefinition,
    pub(super) path: &'a Path,
    /// Folders on the file systems that have the machine's own files.
    pub(super) machine: &'a [PathBuf],
}

impl ImageOpener<'_> {
    fn image(&self) -> PathBuf {
        self.path.join(IMAGE_FILE)
    }

    fn perform(&self, effect: &Effect<'_>, doing: &str) -> Result<()> {
        self.host
            .perform(effect)
            .map(drop)
            .context(|| format!("{doing} of pool {}", self.pool.name))
    }

    pub(super) fn record(&self) -> Result<Option<ImageRecord>> {
        record::load(self.host, &self.path.join(IMAGE_RECORD))
    }

    fn store(&self, record: &ImageRecord) -> Result<()> {
        record::store(self.host, &self.path.join(IMAGE_RECORD), record)
    }

    fn damaged(&self, problem: String) -> Error {
        Error::Damaged {
            path: self.image(),
            problem,
        }
    }

    fn busy(&self, holder: String) -> Error {
        Error::Busy {
            subject: format!("the image of pool {}", self.pool.name),
            holder,
        }
    }

    /// Records the intent and reserves the blocks. What an earlier attempt left was never used.
    pub(super) fn begin(&self, begun: Option<ImageRecord>, wanted: u64) -> Result<ImageRecord> {
        check_image_pool_fs(self.host, self.path)?;
        let there = stat_image(self.host, self.path)?;
        self.check_room(wanted, there.map_or(0, |file| file.allocated))?;
        let pool_fs = self
            .host
            .backing_fs(self.path)
            .context(|| format!("find the file system of {}", self.path.display()))?;
        let record = ImageRecord {
            size: wanted,
            block_size: pool_fs.min_sector,
            formatted: begun.map_or_else(
                || Formatted::begun(FormattedAs::Xfs, self.host.random_uuid()),
                |begun| begun.formatted,
            ),
            created_at: self.host.now(),
        };
        self.store(&record)?;
        let image = self.image();
        if there.is_some_and(|file| file.size > wanted) {
            let found = on(self.host, self.path)?;
            if found.is_some_and(|(_, loops)| !loops.is_empty()) {
                return Err(
                    self.busy("a loop device of an earlier attempt is still attached to it".into())
                );
            }
            let path = image.as_path();
            self.perform(
                &Effect::Truncate { path, size: wanted },
                "truncate the image",
            )?;
        }
        self.reserve(wanted).inspect_err(|_| self.give_up())?;
        Ok(record)
    }

    /// Reserves all blocks, durably.
    fn reserve(&self, size: u64) -> Result<()> {
        let image = self.image();
        let path = image.as_path();
        let reserve = Effect::Allocate {
            path,
            size,
            reserve: true,
        };
        self.perform(&reserve, "reserve the image")?;
        self.perform(&Effect::SyncFile { path }, "sync the image")?;
        self.perform(&Effect::SyncDir { path: self.path }, "sync the image")
    }

    /// Removes an image that could not be reserved. The next attempt continues with what cannot be
    /// removed.
    fn give_up(&self) {
        for name in [IMAGE_FILE, IMAGE_RECORD] {
            let path = self.path.join(name);
            if let Err(error) = self.host.perform(&Effect::RemoveFile { path: &path }) {
                tracing::error!(pool = %self.pool.name, error = %chain(&error), path = %path.display(), "failed to remove an incomplete image");
                return;
            }
        }
    }

    /// Refuses an image that does not fit, before anything is reserved.
    fn check_room(&self, size: u64, allocated: u64) -> Result<()> {
        let space = self
            .host
            .space(self.path)
            .context(|| format!("read the free space of {}", self.path.display()))?;
        let mount = self
            .host
            .mount_of(self.path)
            .context(|| format!("find the mount of {}", self.path.display()))?;
        let kept = match is_of_machine(self.host, mount.mount.device, self.machine) {
            true => machine_reserve(space.total).max(IMAGE_HEADROOM_BYTES),
            false => IMAGE_HEADROOM_BYTES,
        };
        let most = (space.available + allocated).saturating_sub(kept);
        if size <= most {
            return Ok(());
        }
        Err(Error::refused(
            self.path.display(),
            format!(
                "image={size} ({}) does not fit: it is fully reserved at creation, {} are available, and {} must stay free; give at most image={}Mi",
                HumanBytes(size),
                HumanBytes(space.available + allocated),
                HumanBytes(kept),
                most >> 20
            ),
        ))
    }

    /// Reserves the blocks of a larger size in the definition, and records it. If that fails, the
    /// image and its record stay as they were, and the error is returned.
    pub(super) fn reserve_more(
        &self,
        record: ImageRecord,
        wanted: u64,
    ) -> Result<(ImageRecord, Option<Error>)> {
        let file = self.must_stat(&record)?;
        let mut problem = None;
        if wanted > record.size {
            let reserved = self.check_room(wanted, file.allocated);
            match reserved.and_then(|()| self.reserve(wanted)) {
                Ok(()) => {
                    let record = ImageRecord {
                        size: wanted,
                        ..record
                    };
                    self.store(&record)?;
                    return Ok((record, None));
                }
                Err(error) => problem = Some(error),
            }
        }
        // A growth failed or was interrupted. The file system never extends beyond the recorded
        // size, so the blocks after it are not needed.
        if self.must_stat(&record)?.size > record.size {
            let path = self.image();
            let shorten = Effect::Truncate {
                path: &path,
                size: record.size,
            };
            self.perform(&shorten, "truncate the image")?;
        }
        Ok((record, problem))
    }

    fn must_stat(&self, record: &ImageRecord) -> Result<FileStat> {
        match stat_image(self.host, self.path)? {
            None => {
                Err(self
                    .damaged("it is missing, but image.json records that it was created".into()))
            }
            Some(file) if file.size < record.size => Err(self.damaged(format!(
                "it has {} bytes, but its record states {}",
                file.size, record.size
            ))),
            Some(file) => Ok(file),
        }
    }

    /// Returns the only loop device on the image, and attaches one if there is none. Discard is
    /// disabled on it, so that reserved blocks are never freed through it.
    pub(super) fn attach(&self, record: &ImageRecord) -> Result<LoopHold> {
        self.must_stat(record)?;
        let gone = || self.damaged("it was removed just now".into());
        let (file, loops) = on(self.host, self.path)?.ok_or_else(gone)?;
        let hold = match loops.as_slice() {
            [] => self.attach_new(record, &file)?,
            [found] => self.reuse(found, &file)?,
            several => {
                let names: Vec<_> = several
                    .iter()
                    .map(|found| format!("/dev/loop{}", found.number))
                    .collect();
                return Err(self.busy(format!(
                    "{} are attached to it at the same time; detach all but one",
                    names.join(" and ")
                )));
            }
        };
        let number = hold.number;
        self.perform(
            &Effect::DisableDiscard {
                device: &hold.device(),
            },
            "disable discard on the device of the image",
        )?;
        let shown = self
            .host
            .device_bytes(&hold.device())
            .context(|| "read the size of the image's device".into())?;
        if shown < file.size {
            self.perform(
                &Effect::ResizeLoop { number },
                "resize the loop device of the image",
            )?;
        }
        Ok(hold)
    }

    fn attach_new(&self, record: &ImageRecord, file: &FileStat) -> Result<LoopHold> {
        let spec = LoopSpec {
            image: &self.image(),
            backing: file.id,
            block_size: record.block_size,
            autoclear: true,
            read_only: false,
        };
        let attached = attach_loop(self.host, spec);
        attached.context(|| format!("attach the image of pool {}", self.pool.name))
    }

    fn reuse(&self, found: &LoopStatus, file: &FileStat) -> Result<LoopHold> {
        let name = format!("/dev/loop{}", found.number);
        if found.offset != 0 || found.size_limit != 0 || found.read_only {
            return Err(self.busy(format!(
                "{name} maps only a part of it or is read-only; detach it: losetup -d {name}"
            )));
        }
        let held = self
            .host
            .hold_loop(found.number, file.id)
            .context(|| format!("open {name}"))?;
        held.ok_or_else(|| Error::Pending {
            what: format!("{name} of pool {}", self.pool.name),
        })
    }

    /// Runs mkfs unless it was completed before.
    pub(super) fn format_once(&self, record: ImageRecord, device: &Device) -> Result<()> {
        let doing = || format!("probe the image of pool {}", self.pool.name);
        let formatted = record.formatted.clone();
        if formatted.complete {
            let found = self.host.signature(device).context(doing)?;
            return match found {
                Signature::Fs { name, uuid, .. }
                    if name == FsType::Xfs.name() && uuid == formatted.uuid.to_string() =>
                {
                    Ok(())
                }
                found => Err(self.damaged(format!(
                    "the xfs {} was created on it, but {found:?} was found; it is never formatted again, so repair or restore it",
                    formatted.uuid
                ))),
            };
        }
        if self.host.is_claimed(device).context(doing)? {
            return Err(self.busy(format!("{} is in use", device.path.display())));
        }
        let effect = Effect::Format {
            device,
            fs: FsType::Xfs,
            uuid: formatted.uuid,
            // Shared blocks are the purpose of this image. They are the default of mkfs, which its
            // configuration can change.
            options: &["-m".into(), "reflink=1".into()],
            keep_blocks: true,
        };
        self.perform(&effect, "format the image")?;
        self.store(&ImageRecord {
            formatted: Formatted {
                complete: true,
                ..formatted
            },
            ..record
        })
    }

    /// Mounts the device unless it is mounted. Returns the folder at which it is mounted.
    pub(super) fn mount(&self, device: &Device) -> Result<PathBuf> {
        let folder = self.path.join(MOUNT_POINT);
        let target = folder.as_path();
        self.perform(&Effect::MakeDir { path: target }, "create the mount point")?;
        match find_mount(self.host, device, target)? {
            Some(FoundMount::Own) => {}
            Some(FoundMount::Foreign(holder)) => return Err(self.busy(holder)),
            None => {
                let options = OPTIONS.map(str::to_string);
                let spec = MountSpec {
                    device,
                    target,
                    fs: FsType::Xfs,
                    options: &options,
                    read_only: false,
                };
                self.perform(&Effect::Mount(spec), "mount the image")?;
            }
        }
        let shown = self
            .host
            .stat(target)
            .context(|| format!("examine {}", target.display()))?;
        if shown.is_none_or(|shown| shown.id.device != device.rdev) {
            return Err(self.busy(format!(
                "{} does not show the file system of {}",
                target.display(),
                device.path.display()
            )));
        }
        Ok(folder)
    }

    pub(super) fn grow(&self, device: &Device, folder: &Path) -> Result<()> {
        let wanted = self
            .host
            .should_grow(device, folder, FsType::Xfs)
            .context(|| format!("read the size of {}", folder.display()))?;
        if !wanted {
            return Ok(());
        }
        let effect = Effect::GrowFs {
            device,
            mount_point: folder,
            fs: FsType::Xfs,
        };
        self.perform(&effect, "grow the file system")
    }
}
