//! A pool of image files: each volume and snapshot is a file in its directory of the pool.
//!
//! All paths go through a pinned descriptor of the folder, so a file system that is mounted over it
//! later is never taken for the pool.

mod copier;
mod device;
mod linear;
mod listed;
pub mod published;
mod unlocked;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use uuid::Uuid;

pub use linear::mapped_above;
pub use listed::{count_devices, count_devices_on, dead_devices};
pub use unlocked::read_all;

use super::mapped::UnusedTables;
use super::records::{TRASH, VOLUMES, part};
use super::store::{ImageSize, NewImage, Store, StoreProperties};
use super::{Copier, Image, ImageHandle};
use crate::error::{Error, ErrorContext, Result};
use crate::host::{self, Budget, Device, Effect, Extent, FileStat, ForeignFile, Host, Space};
use crate::model::{Wipe, size};

/// The maximum size of a file on an ext4 with blocks of 4 KiB.
const LARGEST_ON_EXT4: u64 = (1 << 44) - 4096;
/// The name of the image of a volume or snapshot within its directory.
pub const IMAGE: &str = "data.img";
/// The name of the image that a volume has taken from its spare, until it is in its place.
const TAKEN: &str = "taken.img";

/// The name of the directory of the volume or snapshot with this image; `None` if it is not the
/// path of an image.
pub fn object_of(image: &Path) -> Option<&str> {
    match image.ends_with(IMAGE) {
        true => image.parent()?.file_name()?.to_str(),
        false => None,
    }
}

/// Prepares the directories of a new pool for images. On btrfs this is possible only while the pool
/// has no image: an image that is written in place and one that is not cannot share blocks.
pub(super) fn prepare(host: &dyn Host, pool: &Path, directories: &[PathBuf]) -> host::Result<()> {
    if host.backing_fs(pool)?.fs_name == "btrfs" {
        for path in directories {
            host.perform(&Effect::WriteInPlace { path })?;
        }
    }
    Ok(())
}

/// The image files of a pool.
pub(super) struct FileStore {
    host: Arc<dyn Host>,
    /// The configured path, for messages.
    path: PathBuf,
    /// The path through the pinned descriptor, for all accesses.
    root: PathBuf,
    is_btrfs: bool,
    facts: StoreProperties,
    /// The extent size hint of new volumes in bytes, if the pool's definition sets one.
    extent: Option<u64>,
    tables: UnusedTables,
}

impl FileStore {
    pub(super) fn open(
        host: Arc<dyn Host>,
        path: &Path,
        root: &Path,
        extent: Option<u64>,
    ) -> host::Result<FileStore> {
        let backing = host.backing_fs(path)?;
        let fs_name = backing.fs_name.as_str();
        // Other file systems may accept a reservation and a clone without keeping either promise
        // (ZFS, bcachefs, f2fs, nilfs2).
        let (thick_refusal, zeroing_refusal) = match fs_name {
            "xfs" | "ext4" | "ext3" | "ext2" => (None, None),
            "btrfs" => (
                Some("btrfs copies on write, even where blocks are reserved"),
                Some(
                    "btrfs copies on write: zeros would go to new blocks, and the old blocks would keep their data",
                ),
            ),
            _ => (
                Some("only xfs and ext4 are known to write to reserved blocks in place"),
                Some("only xfs and ext4 are known to overwrite blocks in place"),
            ),
        };
        let facts = StoreProperties {
            shares_blocks: backing.shares_blocks,
            default_block_size: backing.sector,
            min_block_size: backing.min_sector,
            thick_refusal,
            unshares: true,
            reserves_by_writing: false,
            zeroing_refusal,
            largest: match fs_name {
                "ext4" | "ext3" | "ext2" => LARGEST_ON_EXT4,
                _ => size::MAX,
            },
        };
        Ok(FileStore {
            is_btrfs: fs_name == "btrfs",
            host,
            path: path.to_path_buf(),
            root: root.to_path_buf(),
            facts,
            extent,
            tables: UnusedTables::default(),
        })
    }

    fn image(&self, image: Image) -> PathBuf {
        self.root.join(part(image)).join(IMAGE)
    }

    fn volume(&self, uuid: Uuid) -> PathBuf {
        self.image(Image::Volume(uuid))
    }

    fn perform(&self, effect: Effect<'_>) -> host::Result<()> {
        self.host.perform(&effect).map(drop)
    }

    /// The file of an image that must exist.
    fn get_image(&self, image: Image) -> Result<(PathBuf, FileStat)> {
        let path = self.image(image);
        let found = self.host.stat(&path);
        match found.context(|| format!("find the image of {image}"))? {
            Some(found) => Ok((path, found)),
            None => Err(Error::Damaged {
                path,
                problem: "the image is missing".into(),
            }),
        }
    }
}

impl Store for FileStore {
    fn facts(&self) -> StoreProperties {
        self.facts
    }

    fn space(&self) -> host::Result<Space> {
        self.host.space(&self.root)
    }

    fn trim(&self) -> host::Result<()> {
        let path = &self.root.join(TRASH);
        self.perform(Effect::Trim { path })
    }

    fn allocate_id(&self) -> Result<u32> {
        Ok(0)
    }

    fn size(&self, image: Image) -> host::Result<Option<ImageSize>> {
        let found = self.host.stat(&self.image(image))?;
        Ok(found.map(|found| ImageSize {
            length: found.size,
            allocated: found.allocated,
        }))
    }

    fn extents(&self, image: Image, from: u64, limit: usize) -> host::Result<Option<Vec<Extent>>> {
        self.host.extents(&self.image(image), from, limit).map(Some)
    }

    fn create(&self, image: Image, new: NewImage) -> host::Result<()> {
        let path = &self.image(image);
        if let Some(source) = new.like.filter(|_| self.is_btrfs) {
            let source = &self.image(source);
            self.perform(Effect::MakeLike { path, source })?;
        }
        if let (Image::Volume(_), Some(bytes)) = (image, self.extent) {
            self.perform(Effect::HintExtents { path, bytes })?;
        }
        self.lengthen(image, new.length, new.reserve)
    }

    fn lengthen(&self, image: Image, size: u64, reserve: bool) -> host::Result<()> {
        let path = &self.image(image);
        self.perform(Effect::Allocate {
            path,
            size,
            reserve,
        })
    }

    fn shorten(&self, image: Image, size: u64) -> host::Result<()> {
        let path = &self.image(image);
        self.perform(Effect::Truncate { path, size })
    }

    fn sync(&self, image: Image) -> host::Result<()> {
        let path = &self.image(image);
        self.perform(Effect::SyncFile { path })
    }

    fn sync_all(&self, images: &[Image]) -> host::Result<()> {
        match images {
            [image] => self.sync(*image),
            _ => {
                let paths: Vec<_> = images.iter().map(|image| self.image(*image)).collect();
                self.perform(Effect::SyncAll { paths: &paths })
            }
        }
    }

    fn unshare(&self, image: Image, offset: u64, length: u64) -> host::Result<()> {
        let path = &self.image(image);
        self.perform(Effect::Unshare {
            path,
            offset,
            length,
        })
    }

    fn renew_fs_id(&self, image: Image, uuid: Uuid) -> Result<()> {
        let path = &self.image(image);
        let renewed = self.perform(Effect::RenewFsId { image: path, uuid });
        renewed.context(|| format!("assign a new fsid to the btrfs of {image}"))
    }

    fn open(&self, image: Image) -> Result<ImageHandle> {
        let (path, found) = self.get_image(image)?;
        Ok(ImageHandle {
            host: self.host.clone(),
            path,
            bytes: found.size,
            modified: found.modified,
            device: None,
        })
    }

    fn find_obstacle(&self, file: &dyn ForeignFile) -> host::Result<Option<String>> {
        match self.facts.shares_blocks {
            true => file.find_obstacle(&self.root.join(VOLUMES)),
            false => Ok(Some(
                "the file system of the pool cannot share blocks".into(),
            )),
        }
    }

    fn shares_blocks(&self, image: Image) -> host::Result<bool> {
        self.host.shares_blocks(&self.image(image))
    }

    fn clone_file(&self, file: &dyn ForeignFile, image: Image) -> host::Result<()> {
        let target = &self.image(image);
        self.perform(Effect::CloneWhole {
            source: file.path(),
            target,
        })
    }

    fn copier(&self, source: Image, copy: Image, budget: &Arc<Budget>) -> Result<Box<dyn Copier>> {
        let copy = self.image(copy);
        let mapped = match source {
            Image::Volume(uuid) => Some(linear::device_uuid(uuid)),
            Image::Snapshot(_) => None,
        };
        let (source, found) = self.get_image(source)?;
        Ok(Box::new(copier::FileCopier::new(
            self.host.clone(),
            (source, found.id),
            mapped,
            copy,
            self.is_btrfs,
            budget,
        )))
    }

    /// The names of the image show how far it is: only the volume has `data.img` before the first
    /// rename, and only the spare has it after the second one.
    fn take_image(&self, volume: Uuid, spare: Uuid) -> host::Result<()> {
        let [of, from] = [volume, spare].map(|uuid| self.root.join(part(Image::Volume(uuid))));
        let sync = || {
            self.perform(Effect::SyncDir { path: &from })?;
            self.perform(Effect::SyncDir { path: &of })
        };
        let rename = |from: &Path, to: &Path| {
            self.perform(Effect::Rename { from, to })?;
            sync()
        };
        let (own, taken, its) = (of.join(IMAGE), of.join(TAKEN), from.join(IMAGE));
        // A rename before a crash may not be durable.
        sync()?;
        if self.host.stat(&taken)?.is_none() {
            rename(&its, &taken)?;
        }
        match self.host.stat(&own)? {
            Some(_) => rename(&own, &its),
            None => Ok(()),
        }
    }

    fn place_image(&self, volume: Uuid) -> host::Result<()> {
        let of = self.root.join(part(Image::Volume(volume)));
        let (own, taken) = (&of.join(IMAGE), &of.join(TAKEN));
        if self.host.stat(taken)?.is_some() {
            let rename = Effect::Rename {
                from: taken,
                to: own,
            };
            self.perform(rename)?;
        }
        self.perform(Effect::SyncDir { path: &of })
    }

    fn has_image(&self, dir: &Path) -> host::Result<bool> {
        Ok(self.host.stat(&dir.join(IMAGE))?.is_some())
    }

    fn wipe(&self, dir: &Path, wipe: Wipe) -> Result<bool> {
        let path = &dir.join(IMAGE);
        let wiped = match wipe {
            Wipe::None => Ok(()),
            // xfs frees the blocks of an unlinked file later, and until then they count as shared.
            // The blocks of a truncated file are free at once.
            Wipe::Zero => self
                .perform(Effect::Zero { path })
                .and_then(|()| self.perform(Effect::Truncate { path, size: 0 })),
            Wipe::Discard => self.perform(Effect::Discard { path, from: 0 }),
        };
        wiped.context(|| format!("wipe an image ({})", wipe.as_str()))?;
        Ok(wipe == Wipe::Discard)
    }

    fn remove(&self, dir: &Path) -> host::Result<()> {
        let path = &dir.join(IMAGE);
        self.perform(Effect::RemoveFile { path })
    }

    fn detach_idle(
        &self,
        images: &[Image],
        in_use: &dyn Fn(&Device) -> bool,
    ) -> Result<Vec<(Device, Result<()>)>> {
        let mut removed = self.remove_idle_linear(images, in_use)?;
        let idle = self.list_idle(images, in_use)?;
        let detached = idle.into_iter().map(|(number, backing)| {
            let device = Device::of_loop(number);
            let result = self.perform(Effect::DetachLoop { number, backing });
            let result = result.context(|| format!("detach {}", device.path.display()));
            (device, result)
        });
        removed.extend(detached);
        Ok(removed)
    }
}
