//! The part of one node in a cut, and the steps of which it consists.

use std::time::Duration;

use crate::error::Result;
use crate::model::Level;

/// A step of a cut. Each is done once, in this order, and only after every participant has
/// answered the one before. The consistency of a group follows from this alone; no clocks are
/// compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutStep {
    /// Check whether a cut at this level is possible, before any application is quiesced. Changes
    /// nothing. An error names what prevents the cut, a limit of the class included.
    Ready(Level),
    /// Do everything that can be done while applications run: write back what is dirty, and clone
    /// ahead. Members that are not in use are cut here.
    Ahead {
        /// Applications are held after this step, so that whatever is done here shortens that.
        hooks: bool,
    },
    /// Do what is left before the freeze, while applications are held: write back what they have
    /// written last, update the clones, and estimate again what the freeze will cost. Does
    /// [`CutStep::Ahead`] first if that was left out.
    Prepare,
    /// Freeze every member that has a file system. All are frozen after it; after an error none
    /// is, or soon none will be.
    Freeze,
    /// Cut every member, and thaw each right after its own cut, also after an error.
    Cut,
    /// Verify that the cut holds everything that was written before it: data that the freeze could
    /// not write back is an error, and so is a copy that is not what the cut assumed. Nothing is
    /// frozen any more.
    Written,
}

/// The answer to a [`CutStep`] that was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CutAnswer {
    /// The answer to [`CutStep::Ready`].
    Ready(Readiness),
    /// The answer to [`CutStep::Ahead`].
    Ahead(Prepared),
    /// The answer to [`CutStep::Prepare`].
    Prepared(Prepared),
    /// The answer to [`CutStep::Freeze`].
    Frozen,
    /// The answer to [`CutStep::Cut`].
    Thawed(Thawed),
    /// The answer to [`CutStep::Written`].
    Written,
}

impl CutAnswer {
    /// Whether this is an answer to that step.
    pub fn is_to(&self, step: CutStep) -> bool {
        matches!(
            (step, self),
            (CutStep::Ready(_), CutAnswer::Ready(_))
                | (CutStep::Ahead { .. }, CutAnswer::Ahead(_))
                | (CutStep::Prepare, CutAnswer::Prepared(_))
                | (CutStep::Freeze, CutAnswer::Frozen)
                | (CutStep::Cut, CutAnswer::Thawed(_))
                | (CutStep::Written, CutAnswer::Written)
        )
    }
}

/// The members of one node: of this process ([`super::local::Local`]), or of an agent at the other
/// end of a stream. Dropping a participant, at any time, thaws what it has frozen.
pub trait Participant: Send {
    /// Does a step. The coordinator sends no further step after an error.
    fn step(&mut self, step: CutStep) -> Result<CutAnswer>;

    /// Returns a function that ends the participant from another thread, during whatever step:
    /// it thaws at once, and its step ends with an error. Requested before the first step.
    fn abort(&self) -> Box<dyn Fn() + Send + Sync> {
        Box::new(|| {})
    }
}

/// What a participant reports of its members before a cut.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Readiness {
    /// Members in use.
    pub in_use: usize,
    /// Of those, raw devices: what their writers have not flushed is not in the cut.
    pub raw: usize,
    /// Of those, members whose writers the guard will stop.
    pub frozen: usize,
    /// Members that are not in use. Agents of earlier releases do not report them.
    pub quiet: usize,
    /// About how long their writers will be stopped for the clones alone, one after the other.
    pub stall: Duration,
    /// The member in use whose image has the most extents: its volume's ID, and how many.
    pub most_extents: Option<(String, u64)>,
}

/// What was done before the freeze.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prepared {
    /// Time that the write-back took.
    pub sync: Duration,
    /// Extents cloned.
    pub extents: u64,
    /// As [`Readiness::stall`], estimated again; 0 where it was not.
    pub stall: Duration,
    /// As [`Readiness::most_extents`].
    pub most_extents: Option<(String, u64)>,
}

/// What a participant reports after its cuts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Thawed {
    /// Extents cloned while its members were frozen.
    pub extents: u64,
    /// A member that was no longer frozen when it was thawed, if there was one.
    pub lost: Option<String>,
}
