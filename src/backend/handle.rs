//! An open image, independent of how it is stored.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use nix::errno::Errno;

use crate::error::HostError;
use crate::host::{DeviceHold, Effect, Extent, Host, Piece, Result};

/// An image that can be read, and written while it is being filled.
pub struct ImageHandle {
    pub(super) host: Arc<dyn Host>,
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    pub(super) modified: u64,
    /// The device that shows the image, unless the image is a file.
    pub(super) device: Option<DeviceHold>,
}

impl ImageHandle {
    /// Its length when it was opened. It may be longer than its record says, after a growth that
    /// could not be recorded, and so may be the file system on it.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A number that changes when the image is written to.
    pub fn modified(&self) -> u64 {
        self.modified
    }

    /// Copies a range into another image, which may be on another pool. It is durable only after
    /// [`ImageHandle::sync`].
    pub fn copy_to(&self, target: &ImageHandle, offset: u64, length: u64) -> Result<()> {
        let copy = Effect::CopyRange {
            source: &self.path,
            target: &target.path,
            offset,
            length,
        };
        self.host.perform(&copy).map(drop)
    }

    /// Reads the data of a range, without blocks of zeros.
    pub fn read(&self, offset: u64, length: u64) -> Result<Vec<Piece>> {
        self.host.read_range(&self.path, offset, length)
    }

    /// Writes data and zeros within a range, the rest of which keeps what it has. It is durable only
    /// after [`ImageHandle::sync`].
    pub fn write(&self, range: Range<u64>, pieces: &[Piece], zeros: &[Range<u64>]) -> Result<()> {
        let write = Effect::WriteRange {
            target: &self.path,
            offset: range.start,
            length: range.end - range.start,
            pieces,
            zeros,
        };
        self.host.perform(&write).map(drop)
    }

    /// Gives a range blocks of its own, with the same content, in a pool that reserves blocks by
    /// writing them. They are durable only after [`ImageHandle::sync`].
    pub fn rewrite(&self, offset: u64, length: u64) -> Result<()> {
        let absent = || HostError::errno("rewrite", &self.path, Errno::ENOTBLK);
        let device = &self.device.as_ref().ok_or_else(absent)?.device;
        let range = &(offset..offset + length);
        let rewrite = Effect::Rewrite { device, range };
        self.host.perform(&rewrite).map(drop)
    }

    /// Frees the blocks from an offset on, durably.
    pub fn discard(&self, from: u64) -> Result<()> {
        let path = &self.path;
        self.host.perform(&Effect::Discard { path, from })?;
        self.sync()
    }

    /// Makes the data that was copied into it durable.
    pub fn sync(&self) -> Result<()> {
        let path = &self.path;
        self.host.perform(&Effect::SyncFile { path }).map(drop)
    }

    /// The extents from a byte offset on, at most `limit`. Dirty data is written back first.
    pub fn extents(&self, from: u64, limit: usize) -> Result<Vec<Extent>> {
        self.host.extents(&self.path, from, limit)
    }
}
