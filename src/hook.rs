//! Quiesce and release of applications: sessions.
//!
//! A session is one program that quiesces, prints a line READY, waits for the end of its stdin,
//! releases, and exits; its own deadline releases it too. So the application is released whatever
//! becomes of the driver.

pub mod definition;
pub mod glob;
pub mod local;
pub mod pod;
mod session;

use std::time::Duration;

use crate::error::Result;
use crate::model::SharedVolume;
pub use definition::{HookDefinition, HookParts};
pub use local::LocalHooks;
pub use pod::{HookRights, PodHooks};

/// Whose hooks are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookTarget {
    /// Id of the volume.
    pub volume_id: String,
    /// "namespace/name" of its claim, if it's known.
    pub claim: Option<String>,
    /// Node that its users are on, if it's known.
    pub node: Option<String>,
}

impl HookTarget {
    /// Namespace of its claim, if it's known.
    pub fn namespace(&self) -> Option<String> {
        let (namespace, _) = self.claim.as_ref()?.split_once('/')?;
        Some(namespace.to_string())
    }
}

/// Starts the sessions of volumes.
pub trait Hooks: Send + Sync + 'static {
    /// Names of the hooks that `targets` have, each once; what `shared` refuses is an error.
    /// Empty where none is configured, or all are skipped.
    fn wanted(&self, targets: &[HookTarget], shared: SharedVolume) -> Result<Vec<String>>;

    /// Starts the hooks of these names in parallel, and waits until each has said READY, for at
    /// most `timeout` in all. On an error ([`crate::error::Error::QuiesceFailed`]) those that had
    /// started are released. A crash of this process ends their stdin, and so releases them too.
    fn quiesce(&self, names: &[String], timeout: Duration) -> Result<Box<dyn Quiesced>>;

    /// How somebody who has none gets one, for the sentence of a refusal.
    fn how(&self) -> &'static str {
        "select the volume or its claim in a [[hook]]"
    }
}

/// Applications that stand still. Dropping it releases them all.
pub trait Quiesced: Send {
    /// Whether every session still lives, and so still holds: an error names the one that doesn't.
    fn verify(&mut self) -> Result<()>;

    /// Ends the sessions: end of file on their stdin, a grace period, then a kill. All are ended
    /// when it returns, whatever it returns. Text if one had to be killed: it held through the
    /// cut, which is good all the same. An error ([`crate::error::Error::QuiesceFailed`]) if one
    /// ended with a failure: that is how a session says that what it held was lost.
    fn release(self: Box<Self>) -> Result<Option<String>>;
}

/// No hooks at all.
pub struct NoHooks;

impl Hooks for NoHooks {
    fn wanted(&self, _targets: &[HookTarget], _shared: SharedVolume) -> Result<Vec<String>> {
        Ok(Vec::new())
    }

    fn quiesce(&self, _names: &[String], _timeout: Duration) -> Result<Box<dyn Quiesced>> {
        Ok(Box::new(NoHooks))
    }
}

impl Quiesced for NoHooks {
    fn verify(&mut self) -> Result<()> {
        Ok(())
    }

    fn release(self: Box<Self>) -> Result<Option<String>> {
        Ok(None)
    }
}
