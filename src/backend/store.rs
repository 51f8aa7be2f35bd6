//! What a kind of pool implements: how it stores images, and the devices on them. Everything else
//! is the same for all kinds ([`PoolBackend`](super::PoolBackend)) and uses only these traits.

use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;
use uuid::Uuid;

use super::records::part;
use super::{AttachMode, Attached, Copier, FoundDevice, Image, ImageHandle, MetadataSpace};
use crate::error::{ErrorContext, HostError, Result};
use crate::host::{self, Budget, Device, DeviceHold, Extent, ForeignFile, Space};
use crate::model::{Allocation, Wipe};
use crate::record::VolumeRecord;

/// What does not change while a pool is open.
#[derive(Clone, Copy, Debug)]
pub struct StoreProperties {
    /// Whether images can share blocks. Otherwise snapshots are full copies.
    pub shares_blocks: bool,
    /// The logical block size if the storage class does not set one.
    pub default_block_size: u32,
    /// The smallest logical block size that a storage class may set: the one that the pool's disk
    /// supports.
    pub min_block_size: u32,
    /// Why this pool cannot have thick volumes; `None` if it can.
    pub thick_refusal: Option<&'static str>,
    /// Whether un-shared blocks are overwritten in place. Otherwise the first write to each block
    /// after a snapshot needs a free one, for which space is kept in the accounts.
    pub unshares: bool,
    /// Whether the blocks of thick volumes are reserved by writing them, which takes as long as a copy.
    pub reserves_by_writing: bool,
    /// Why writing zeros would not overwrite the old blocks; `None` if it would.
    pub zeroing_refusal: Option<&'static str>,
    /// The maximum size of an image in bytes.
    pub largest: u64,
}

/// The size of an image, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct ImageSize {
    pub(super) length: u64,
    /// Its blocks, including shared ones.
    pub(super) allocated: u64,
}

/// An image that is to be created.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewImage {
    /// The image with which it will share blocks.
    pub(super) like: Option<Image>,
    pub(super) length: u64,
    /// Reserve all blocks now.
    pub(super) reserve: bool,
}

/// An image that was deleted and still has its blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeletedImage {
    /// `None` if its record cannot be read.
    pub(super) lineage: Option<Uuid>,
    pub(super) allocation: Allocation,
    /// In bytes.
    pub(super) length: u64,
    /// Bytes of its blocks, including shared ones.
    pub(super) blocks: u64,
}

/// The images of one pool. A directory of the pool exists for each of them, which contains its
/// record.
pub(super) trait Store: Devices {
    fn facts(&self) -> StoreProperties;
    /// The total and the free space.
    fn space(&self) -> host::Result<Space>;
    /// The space for maps, without what is reserved, if the kind of pool has it apart from data.
    fn metadata(&self) -> host::Result<Option<MetadataSpace>> {
        Ok(None)
    }
    /// The images that were deleted and still have their blocks, which volumes may share.
    fn deleted(&self) -> host::Result<Vec<DeletedImage>> {
        Ok(Vec::new())
    }
    /// Discards the free blocks of the pool's disk.
    fn trim(&self) -> host::Result<()>;

    /// Takes a number for a new image, which is stored in its record. It stays taken until the
    /// process ends, because a deleted record may come back with a power loss.
    fn allocate_id(&self) -> Result<u32>;
    /// `None` if the image does not exist.
    fn size(&self, image: Image) -> host::Result<Option<ImageSize>>;
    /// The sizes of several images, in their order.
    fn sizes(&self, images: &[Image]) -> host::Result<Vec<Option<ImageSize>>> {
        images.iter().map(|image| self.size(*image)).collect()
    }
    /// The extents of an image from a byte offset on, at most `limit`, and none at its end. Dirty data is
    /// written back first. `None` if the store would need a device for it.
    fn extents(
        &self,
        _image: Image,
        _from: u64,
        _limit: usize,
    ) -> host::Result<Option<Vec<Extent>>> {
        Ok(None)
    }
    /// The length of an image in bytes; `None` if it does not exist.
    fn length(&self, image: Image) -> host::Result<Option<u64>> {
        Ok(self.size(image)?.map(|size| size.length))
    }
    /// Creates an image, or does nothing if a copier creates it.
    fn create(&self, image: Image, new: NewImage) -> host::Result<()>;
    /// Opens the image of a volume to reserve blocks beyond what its users can write, up to `length`.
    /// Returns it with the offset from which on no user can write. Requires
    /// [`StoreProperties::reserves_by_writing`].
    fn open_beyond(&self, image: Image, _length: u64) -> Result<(ImageHandle, u64)> {
        let refused = HostError::errno("reserve", part(image), Errno::EOPNOTSUPP);
        Err(refused).context(|| format!("extend the image of {image}"))
    }
    /// Extends an image to at least this length, and reserves all its blocks if `reserve` is set.
    fn lengthen(&self, image: Image, length: u64, reserve: bool) -> host::Result<()>;
    /// Cuts an image to this length, and frees the blocks beyond it.
    fn shorten(&self, image: Image, length: u64) -> host::Result<()>;
    /// Makes the data and the length of an image durable.
    fn sync(&self, image: Image) -> host::Result<()>;
    /// The same for several images. After an error, any of them may be durable.
    fn sync_all(&self, images: &[Image]) -> host::Result<()> {
        images.iter().try_for_each(|image| self.sync(*image))
    }
    /// Gives a range of an image blocks of its own. It is durable only after [`Store::sync`].
    fn unshare(&self, image: Image, offset: u64, length: u64) -> host::Result<()>;
    /// Gives the btrfs on an image a new fsid. No device may be attached to the image.
    fn renew_fs_id(&self, image: Image, fs_id: Uuid) -> Result<()>;
    fn open(&self, image: Image) -> Result<ImageHandle>;
    /// Why no image can share blocks with a file that the driver did not create; `None` if one can.
    fn find_obstacle(&self, _file: &dyn ForeignFile) -> host::Result<Option<String>> {
        Ok(Some("the images of this pool are not files".into()))
    }
    /// Whether an image shares blocks with another file or image.
    fn shares_blocks(&self, _image: Image) -> host::Result<bool> {
        Ok(true)
    }
    /// Replaces the content of an image by that of such a file, whose length it takes and whose blocks
    /// it shares. Requires that [`Store::find_obstacle`] finds nothing.
    fn clone_file(&self, _file: &dyn ForeignFile, image: Image) -> host::Result<()> {
        Err(HostError::errno("clone to", part(image), Errno::EOPNOTSUPP))
    }
    /// Requires [`StoreProperties::shares_blocks`].
    fn copier(&self, source: Image, copy: Image, budget: &Arc<Budget>) -> Result<Box<dyn Copier>>;

    /// Gives a volume the image of its spare, and the spare that of the volume, durably. The records say
    /// so already. A repeat continues what a crash has interrupted. The volume has no image until
    /// [`Store::place_image`].
    fn take_image(&self, _volume: Uuid, _spare: Uuid) -> host::Result<()> {
        Ok(())
    }
    /// Puts the image that a volume has taken to its place, once its spare is durably in the trash. A
    /// repeat does nothing.
    fn place_image(&self, _volume: Uuid) -> host::Result<()> {
        Ok(())
    }

    /// Whether a directory, which may be in the trash, has an image, or a record that names one.
    fn has_image(&self, dir: &Path) -> host::Result<bool>;
    /// Overwrites or discards the blocks of the image of a directory in the trash. Returns whether
    /// [`Store::trim`] must discard them after the image was removed.
    fn wipe(&self, dir: &Path, wipe: Wipe) -> Result<bool>;
    /// Deletes the image of a directory in the trash.
    fn remove(&self, dir: &Path) -> host::Result<()>;

    /// Detaches those devices of `images` that are not in use, and returns each with the result. A
    /// device whose status cannot be read is kept.
    fn detach_idle(
        &self,
        images: &[Image],
        in_use: &dyn Fn(&Device) -> bool,
    ) -> Result<Vec<(Device, Result<()>)>>;
}

/// Opens the device of a volume, if it is one of those that pods have.
pub type FindPublished<'a> = Box<dyn Fn(Uuid) -> Result<Option<Watched>> + 'a>;

/// A device that a pod has.
pub struct Watched {
    /// Keeps it open, so that its number is not used for another volume.
    pub hold: DeviceHold,
    pub watch: Arc<dyn Watch>,
}

/// The state of a device at the time when a pod got it.
pub trait Watch: Send + Sync {
    /// Corrects what is different now, and returns what cannot be corrected.
    fn examine(&self) -> Result<Option<String>>;
    /// Detaches the device if it shows another image now, because it is no longer found as the
    /// device of its volume. The device must still be open.
    fn detach_changed(&self) -> Result<()>;
}

/// The devices of a pool's volumes. The caller holds the lock of the volume that it names.
pub trait Devices: Send + Sync + 'static {
    /// Every device on the image, including foreign ones; empty if there is no image.
    fn list(&self, uuid: Uuid) -> Result<Vec<FoundDevice>>;
    /// Returns the volume's device, and attaches one if there is none. Never attaches a second one.
    fn attach(&self, record: &VolumeRecord, mode: AttachMode) -> Result<Attached>;
    /// Detaches a device that [`Devices::list`] returned, if it is still attached to this image.
    /// The kernel detaches a device that is open elsewhere when its last opener closes it.
    fn detach(&self, uuid: Uuid, device: &Device) -> Result<()>;
    /// Watches a device that is given to a pod; `None` if a pod cannot change it.
    fn watch(&self, uuid: Uuid, attached: Attached) -> Result<Option<Watched>>;
    /// Finds devices that an earlier process gave to pods, among these device numbers; `None` if
    /// none of them is of this kind.
    fn find_published(&self, nodes: &[u64]) -> Option<FindPublished<'_>>;
    /// The number of volumes that are attached without a loop device. Loop devices are counted by
    /// [`count_devices`](super::file::count_devices), also those of pools that are not open.
    fn count_without_loops(&self) -> Result<usize> {
        Ok(0)
    }
    /// Must be called with a device that was the volume's and is detached. It removes the settings
    /// that the volume made on the device, so that the next user of its number does not get them.
    fn released(&self, record: &VolumeRecord, device: &Device) -> Result<()>;
    /// Updates a device to the present size of the image.
    fn resize(&self, record: &VolumeRecord, device: &Device) -> Result<()>;
}
