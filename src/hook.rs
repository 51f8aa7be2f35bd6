//! Quiescing and releasing applications with sessions.
//!
//! A session is one program that quiesces its application, prints the line READY, waits for the end
//! of its stdin, releases the application, and exits; at its own timeout it releases, too. So the
//! application is released even if the driver dies.

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

/// A volume whose hooks are requested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookTarget {
    pub volume_id: String,
    /// "namespace/name" of its PVC, if known.
    pub claim: Option<String>,
    /// The node of the pods that use it, if known.
    pub node: Option<String>,
}

impl HookTarget {
    /// Namespace of its PVC, if known.
    pub fn namespace(&self) -> Option<String> {
        let (namespace, _) = self.claim.as_ref()?.split_once('/')?;
        Some(namespace.to_string())
    }
}

/// Starts the sessions of volumes.
pub trait Hooks: Send + Sync + 'static {
    /// Names of the hooks of `targets`, each once; it fails if `shared` refuses the hooks of a
    /// shared volume. Empty if no hook is configured, or all are skipped.
    fn wanted(&self, targets: &[HookTarget], shared: SharedVolume) -> Result<Vec<String>>;

    /// Starts these hooks in parallel, and waits until each has written READY, for at most
    /// `timeout` in total. After an error ([`crate::error::Error::QuiesceFailed`]) those that had
    /// started are released. A crash of this process closes their stdin, and so releases them too.
    fn quiesce(&self, names: &[String], timeout: Duration) -> Result<Box<dyn Quiesced>>;

    /// What a user can do to configure a hook, for the message of a refusal.
    fn how(&self) -> &'static str {
        "select the volume or its claim in a [[hook]]"
    }
}

/// Quiesced applications. Dropping this releases all of them.
pub trait Quiesced: Send {
    /// Whether every session is alive, and so its application still quiesced; the error names a
    /// session that is not.
    fn verify(&mut self) -> Result<()>;

    /// Ends the sessions: end of file on their stdin, a grace period, then a kill. All have ended
    /// when it returns. Returns a message if one had to be killed; its application was quiesced
    /// during the cut, so the cut is good nevertheless. Returns an error
    /// ([`crate::error::Error::QuiesceFailed`]) if one exited with a failure, which means that its
    /// application did not stay quiesced.
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
