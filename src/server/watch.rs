//! Surrounds every call, also to unknown services, with one span, one log line and one count.
//!
//! The span contains the IDs, which the service records ([`crate::service`]); the line at the end
//! contains the code, the time, and on failure the error. The error of a call is logged only here.
//! Neither ever contains a secret.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use tonic::{Code, Status};
use tower::{Layer, Service};
use tracing::field::Empty;
use tracing::{Instrument, Span};

use super::work::{Begun, Calls};
use crate::service::Rpc;
use crate::service::status::code_name;
use crate::telemetry::Metrics;

/// The tower layer.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    metrics: Arc<Metrics>,
    calls: Calls,
}

impl Watch {
    pub(super) fn new(metrics: Arc<Metrics>, calls: Calls) -> Watch {
        Watch { metrics, calls }
    }
}

/// Calls of the router and of the administrator's commands: their paths, and their names in logs
/// and metrics.
const BESIDE_CSI: [(&str, &str); 25] = [
    ("/slackwater.agent.v1.Agent/Describe", "Agent.Describe"),
    ("/slackwater.agent.v1.Agent/Find", "Agent.Find"),
    ("/slackwater.agent.v1.Agent/Cut", "Agent.Cut"),
    ("/slackwater.agent.v1.Agent/GetGroup", "Agent.GetGroup"),
    (
        "/slackwater.agent.v1.Agent/SettleGroup",
        "Agent.SettleGroup",
    ),
    (
        "/slackwater.agent.v1.Agent/DeleteGroup",
        "Agent.DeleteGroup",
    ),
    ("/slackwater.agent.v1.Agent/DeleteOne", "Agent.DeleteOne"),
    ("/slackwater.agent.v1.Agent/Offer", "Agent.Offer"),
    (
        "/slackwater.agent.v1.Agent/SnapshotForClone",
        "Agent.SnapshotForClone",
    ),
    ("/slackwater.agent.v1.Agent/Receive", "Agent.Receive"),
    ("/slackwater.agent.v1.Agent/Fence", "Agent.Fence"),
    (
        "/slackwater.agent.v1.Agent/SnapshotForMove",
        "Agent.SnapshotForMove",
    ),
    (
        "/slackwater.agent.v1.Agent/DeleteMoved",
        "Agent.DeleteMoved",
    ),
    (
        "/slackwater.agent.v1.Agent/LookForMove",
        "Agent.LookForMove",
    ),
    ("/slackwater.agent.v1.Agent/Revert", "Agent.Revert"),
    (
        "/slackwater.agent.v1.Agent/LookForRevert",
        "Agent.LookForRevert",
    ),
    (
        "/slackwater.agent.v1.Agent/DescribeVolumes",
        "Agent.DescribeVolumes",
    ),
    ("/slackwater.agent.v1.Agent/AdoptPool", "Agent.AdoptPool"),
    ("/slackwater.agent.v1.Agent/ForgetPool", "Agent.ForgetPool"),
    ("/slackwater.agent.v1.Peer/Read", "Peer.Read"),
    (
        "/slackwater.agent.v1.Admin/CheckVolume",
        "Admin.CheckVolume",
    ),
    (
        "/slackwater.agent.v1.Admin/DeleteSnapshot",
        "Admin.DeleteSnapshot",
    ),
    ("/slackwater.agent.v1.Admin/Export", "Admin.Export"),
    ("/slackwater.agent.v1.Admin/Import", "Admin.Import"),
    ("/slackwater.agent.v1.Admin/ImportFile", "Admin.ImportFile"),
];

/// Those of them that the router repeats all the time.
const POLLS: [&str; 4] = [
    "Agent.Describe",
    "Agent.DescribeVolumes",
    "Agent.LookForMove",
    "Agent.LookForRevert",
];

/// The name of a call by its path, and whether it is a poll, which is logged at debug level.
fn method(path: &str) -> (&'static str, bool) {
    if let Some(rpc) = Rpc::of_path(path) {
        return (rpc.name(), rpc.is_poll());
    }
    match BESIDE_CSI.into_iter().find(|(known, _)| *known == path) {
        Some((_, name)) => (name, POLLS.contains(&name)),
        None => ("unknown", false),
    }
}

impl<S> Layer<S> for Watch {
    type Service = Watched<S>;
    fn layer(&self, inner: S) -> Watched<S> {
        Watched {
            inner,
            watch: self.clone(),
        }
    }
}

/// A service with the layer.
#[derive(Clone, Debug)]
pub(super) struct Watched<S> {
    inner: S,
    watch: Watch,
}

impl<S, A, B> Service<http::Request<A>> for Watched<S>
where
    S: Service<http::Request<A>, Response = http::Response<B>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<A>) -> Self::Future {
        let (method, poll) = method(request.uri().path());
        // At error level, so that calls have their IDs with any filter.
        let span = tracing::error_span!(
            "call",
            method,
            volume_name = Empty,
            volume_id = Empty,
            snapshot_name = Empty,
            snapshot_id = Empty,
            group_snapshot_name = Empty,
            group_snapshot_id = Empty,
            source_volume_id = Empty,
            source_volume_ids = Empty,
            source_snapshot_id = Empty,
            snapshot_ids = Empty,
            base_snapshot_id = Empty,
            target_snapshot_id = Empty,
            node_id = Empty,
            staging_target_path = Empty,
            target_path = Empty,
            volume_path = Empty,
        );
        let running = self.inner.call(request).instrument(span.clone());
        let mut call = Call {
            method,
            poll,
            begun: Instant::now(),
            span,
            metrics: self.watch.metrics.clone(),
            _begun: self.watch.calls.begin(),
            status: Some(Status::cancelled(
                "the caller has gone; the operation continues",
            )),
        };
        Box::pin(async move {
            let response = running.await;
            // If the headers contain no status, the call succeeded.
            call.set_status(match &response {
                Ok(response) => Status::from_header_map(response.headers()),
                Err(_) => Some(Status::unknown("no service is available")),
            });
            response
        })
    }
}

/// A call in progress. It ends when this is dropped, also if the caller disconnected.
struct Call {
    method: &'static str,
    poll: bool,
    begun: Instant,
    span: Span,
    metrics: Arc<Metrics>,
    _begun: Begun,
    status: Option<Status>,
}

impl Call {
    fn set_status(&mut self, status: Option<Status>) {
        self.status = status;
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let took = self.begun.elapsed();
        let code = self.status.as_ref().map_or(Code::Ok, Status::code);
        let error = self.status.as_ref().map_or("", Status::message);
        self.metrics.call_ended(self.method, code_name(code), took);
        let _entered = self.span.enter();
        let (code_name, ms) = (code_name(code), milliseconds(took));
        match code {
            Code::Ok if self.poll => tracing::debug!(code = code_name, ms, "done"),
            Code::Ok => tracing::info!(code = code_name, ms, "done"),
            Code::Internal | Code::Unknown => {
                tracing::error!(code = code_name, ms, error, "failed");
            }
            _ => tracing::warn!(code = code_name, ms, error, "refused"),
        }
    }
}

/// With three decimal places.
fn milliseconds(took: std::time::Duration) -> f64 {
    (took.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_of_an_agent_has_its_name() {
        let proto = include_str!("../../proto/agent.proto");
        let mut service = "";
        let mut calls = Vec::new();
        for line in proto.lines().map(str::trim_start) {
            if let Some(rest) = line.strip_prefix("service ") {
                service = rest.split(' ').next().unwrap_or_default();
            } else if let Some(rest) = line.strip_prefix("rpc ") {
                let call = rest.split('(').next().unwrap_or_default();
                let name = format!("{service}.{call}");
                let path = format!("/slackwater.agent.v1.{service}/{call}");
                let is_poll = POLLS.contains(&&*name);
                assert_eq!(method(&path), (&*name, is_poll));
                calls.push(name);
            }
        }
        assert_eq!(calls, BESIDE_CSI.map(|(_, name)| name));
        assert_eq!(method("/csi.v1.Identity/Probe"), ("Probe", true));
        for path in ["/csi.v1.Identity/Describe", "/x/Describe", "Describe", ""] {
            assert_eq!(method(path), ("unknown", false));
        }
    }
}
