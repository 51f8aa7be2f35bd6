//! The gRPC services of one node.
//!
//! Each call has the same three steps: [`request`] converts the message to a value or refuses it,
//! an operation of the [`Driver`] does the work, detached from the caller, and [`reply`] converts
//! the result to a message. Only [`status`](mod@status) maps errors to gRPC codes. No other
//! decisions are made here.

mod admin;
mod agent;
mod controller;
mod deadline;
mod group;
mod identity;
pub(crate) mod ids;
mod node;
mod peer;
mod prerequisites;
pub(crate) mod reached;
pub(crate) mod reply;
pub mod request;
mod rpc;
mod snapshot_metadata;
pub mod status;

use std::fmt::Debug;
use std::sync::Arc;

use tonic::{Request, Response, Status};

use crate::error::{Error, Result};
use crate::model::Alpha;
use crate::operation::Driver;

pub(crate) use deadline::{max_wait, timeout};
use ids::Ids;
pub use peer::{Callers, PeerDial, PeerService, Peers};
use prerequisites::PrerequisiteCheck;
pub use request::ONLY_POOL;
use request::WithClassWarning;
pub use rpc::Rpc;
pub use status::status;

/// The services Identity, Controller, GroupController, SnapshotMetadata, Node, Agent and Admin on one
/// driver.
#[derive(Clone)]
pub struct Service {
    driver: Arc<Driver>,
    alpha: Alpha,
    descriptions: agent::DescriptionCache,
    prerequisites: PrerequisiteCheck,
    peers: Option<Peers>,
}

/// The result type of a gRPC method.
pub(crate) type RpcResult<T> = std::result::Result<Response<T>, Status>;

impl Service {
    /// Creates the services of a driver that has started.
    pub fn new(driver: Arc<Driver>, alpha: Alpha) -> Service {
        let descriptions = agent::DescriptionCache::default();
        Service {
            driver,
            alpha,
            descriptions,
            prerequisites: PrerequisiteCheck::default(),
            peers: None,
        }
    }

    /// The topology key, if snapshots report their topology.
    fn snapshot_topology_key(&self) -> Option<String> {
        let is_shown = self.alpha.snapshot_topology;
        is_shown.then(|| self.driver.pools.topology_key())
    }

    /// Passes a parsed request to its operation. The work continues even if the caller disconnects.
    async fn run<A, T>(
        &self,
        rpc: Rpc,
        args: Result<A>,
        work: impl FnOnce(&Driver, &A) -> Result<T> + Send + 'static,
    ) -> std::result::Result<T, Status>
    where
        A: Send + 'static,
        T: Send + 'static,
    {
        let outcome = match args {
            Ok(args) => {
                let work = move |driver: &Driver| work(driver, &args);
                self.driver.run_blocking_in(rpc.class(), work).await
            }
            Err(error) => Err(error),
        };
        outcome.map_err(|error| status(rpc, &error))
    }
}

/// Takes the message out of a request. Records the request's IDs on the span, and logs the redacted
/// message at trace level.
pub(crate) fn log_and_unwrap<M: Ids + Debug>(request: Request<M>) -> M {
    let message = request.into_inner();
    message.note();
    tracing::trace!(request = ?message, "received");
    message
}

/// Logs a warning, once per call, if the class of a request contains `deletionPolicy` as a
/// parameter.
pub(crate) fn warn_misplaced_policy<T>(request: WithClassWarning<T>) -> T {
    if request.slip {
        tracing::warn!(
            "ignoring parameters.deletionPolicy: it is a field of the class next to its parameters; move it there"
        );
    }
    request.args
}

/// Refuses a call of an alpha feature that is not enabled.
pub(crate) fn only_if(served: bool, rpc: Rpc, name: &str) -> std::result::Result<(), Status> {
    if served {
        return Ok(());
    }
    let what = format!("{rpc} (an alpha feature of CSI; --alpha {name})");
    Err(status(rpc, &Error::NotEnabled { what }))
}

fn answer<T>(message: T) -> RpcResult<T> {
    Ok(Response::new(message))
}
