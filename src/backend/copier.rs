//! The copy of one image while its volume may be in use: the backend's share of a consistent cut.

use std::time::Duration;

use crate::host::{DeviceHold, FileId, Result};

/// Whether an image is copied in one step, or ahead of the freeze with a remainder within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMode {
    /// By [`Copier::copy_whole`].
    Whole,
    /// By [`Copier::copy_ahead`] and [`Copier::copy_delta`].
    Ahead,
}

/// What a copy costs at the moment of the cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyCost {
    /// Extents of the image.
    pub extents: u64,
    /// About how long writers wait for the copy.
    pub stall: Duration,
}

/// Makes the copy of one image of this pool. The copy was prepared before, and is deleted by the
/// caller if anything fails: then, and after a crash, its content is undefined.
///
/// Each number returned is the number of extents or ranges that were copied.
pub trait Copier: Send + Sync {
    /// The image, as the guard's journal names it.
    fn image(&self) -> FileId;

    /// The mapped device of the image, held open, if one shows it. It must be suspended while the
    /// copy is made.
    fn mapped(&self) -> Result<Option<DeviceHold>> {
        Ok(None)
    }

    /// Whether copies on this pool that run in parallel are no faster than one after the other.
    fn is_serial(&self) -> bool;

    /// What the copy costs now. After a pass in mode [`CopyMode::Ahead`], the number of extents is
    /// the one that the last pass found, so that nothing is read again.
    fn cost(&self, mode: CopyMode) -> Result<CopyCost>;

    /// Copies the whole image in one atomic step.
    fn copy_whole(&self) -> Result<u64>;

    /// Copies the image in pieces while writers may change it. The result is consistent only after
    /// [`Copier::copy_delta`] has run while nothing was written.
    fn copy_ahead(&self) -> Result<u64>;

    /// Copies again what was written since the pass before. May run any number of times while
    /// writers change the image, and once after [`Copier::seal`] while they are stopped.
    fn copy_delta(&self) -> Result<u64>;

    /// How many ranges a pass must copy for another pass to gain anything: while it copies fewer,
    /// it takes longer to find them than to copy them, and the next pass finds as many.
    fn min_useful_ranges(&self) -> u64;

    /// Declares that the next [`Copier::copy_delta`] is the last one, and allocates all the memory
    /// that it needs.
    fn seal(&self);

    /// Whether the copy has the contents that the last pass assumed. Called after the thaw.
    fn verify(&self) -> Result<bool>;
}
