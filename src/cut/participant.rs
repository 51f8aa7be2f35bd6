//! One node's share in a cut.

use std::time::Duration;

use crate::error::Result;
use crate::model::Level;

/// One node's members: of this process ([`super::local::Local`]), or those of another node's
/// agent at the other end of a stream.
///
/// The coordinator calls `ready`, `ahead`, `prepare`, `freeze`, `cut` and `written`, each once and
/// in this order, and each only after every participant has answered the one before: that is the
/// whole proof of a group's consistency, no clock is compared. Applications are held between
/// `ahead` and `prepare`. Dropping a participant, at any time, thaws what it
/// has frozen.
pub trait Participant: Send {
    /// Looks whether a cut at `level` can be made, before anybody is quiesced. Changes nothing.
    /// An error names what stands in its way, a limit of the class included.
    fn ready(&mut self, level: Level) -> Result<Readiness>;

    /// Everything that can be done while applications still run: writes back what is dirty, and
    /// clones ahead. Members that nobody uses are cut here. `hooks`: applications are held after
    /// it, so that whatever is done here shortens that.
    fn ahead(&mut self, hooks: bool) -> Result<Prepared>;

    /// What is left to do before the freeze, while applications are held: writes back what they
    /// have written last, puts the clones right, and says what the freeze will cost now. Where
    /// `ahead` wasn't called, it does that first.
    fn prepare(&mut self) -> Result<Prepared>;

    /// Freezes every member that has a file system. All stand still when it returns; on an error
    /// none does, or none soon.
    fn freeze(&mut self) -> Result<()>;

    /// Cuts every member, and thaws each right after its own cut, also after an error.
    fn cut(&mut self) -> Result<Thawed>;

    /// Whether all that was written before the cut is in it: what the freeze itself couldn't
    /// write back is an error, and so is a copy that isn't what the cut took it to be. Nobody
    /// stands still any more.
    fn written(&mut self) -> Result<()>;

    /// What ends it from another thread, whatever step it's in: it thaws at once, and its step
    /// ends with an error. Asked for before the first step.
    fn abort(&self) -> Box<dyn Fn() + Send + Sync> {
        Box::new(|| {})
    }
}

/// What a participant says of its members before a cut.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// Members that somebody uses.
    pub in_use: usize,
    /// Of those, raw devices: nothing can hold them still.
    pub raw: usize,
    /// Of those, members that will be frozen.
    pub frozen: usize,
    /// About how long their writers will stand still for the clones alone, all of them in series.
    pub stall: Duration,
    /// The member in use whose image is in the most pieces: its volume's id, and how many.
    pub most_extents: Option<(String, u64)>,
}

/// What was done ahead.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prepared {
    /// Time that writing back took.
    pub sync: Duration,
    /// Extents cloned.
    pub extents: u64,
    /// As [`Readiness::stall`], as it is now; 0 where it wasn't estimated again.
    pub stall: Duration,
    /// As [`Readiness::most_extents`].
    pub most_extents: Option<(String, u64)>,
}

/// What a participant says after its cuts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thawed {
    /// Extents cloned while its members stood still.
    pub extents: u64,
    /// Nothing, if every member was still frozen when it was thawed; else which one wasn't.
    pub lost: Option<String>,
}
