//! One call to the router: its deadline, the agents it asked, and how long that took.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use tonic::transport::Channel;
use tonic::{Code, ConnectError, Request, Response, Status};

use super::Router;
use super::agents::{Agent, beneath};
use crate::csi::controller_client::ControllerClient;
use crate::error::{Error, Result};
use crate::service::status::code_name;
use crate::service::{Rpc, RpcResult, max_wait, status, timeout};

/// A request with a time limit.
pub(super) fn within<M>(message: M, limit: Duration) -> Request<M> {
    let mut request = Request::new(message);
    request.set_timeout(limit);
    request
}

/// A call in progress. If it is dropped (because of its deadline, or because the caller
/// disconnected), its requests to agents are dropped as well: their work continues there, detached.
pub(super) struct Call<'a> {
    router: &'a Router,
    rpc: Rpc,
    begun: Instant,
    until: Option<Instant>,
    /// How long it may wait for locks.
    max_wait: Duration,
    /// Number of requests to agents, and how long the last one took.
    asked: Mutex<(u32, Duration)>,
}

impl Router {
    /// Starts a call; must be created before anything else is done for a request.
    pub(super) fn call<M>(&self, rpc: Rpc, request: &Request<M>) -> Call<'_> {
        let begun = Instant::now();
        Call {
            router: self,
            rpc,
            begun,
            until: timeout(request.metadata()).and_then(|left| begun.checked_add(left)),
            max_wait: max_wait(request),
            asked: Mutex::default(),
        }
    }
}

impl Call<'_> {
    /// The RPC of the call.
    pub(super) fn rpc(&self) -> Rpc {
        self.rpc
    }

    /// How long it may wait for locks before it begins.
    pub(super) fn max_wait(&self) -> Duration {
        self.max_wait
    }

    /// A request to an agent, with the remaining time as its deadline.
    pub(super) fn request<M>(&self, message: M) -> Result<Request<M>> {
        let mut request = Request::new(message);
        if let Some(until) = self.until {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Forwarded {
                    code: Code::DeadlineExceeded as i32,
                    message: "the deadline of the call has passed".into(),
                });
            }
            request.set_timeout(left);
        }
        Ok(request)
    }

    /// Asks an agent, and counts its answer.
    pub(super) async fn ask<A>(
        &self,
        agent: &Agent,
        question: impl Future<Output = std::result::Result<Response<A>, Status>>,
    ) -> Result<Response<A>> {
        let begun = Instant::now();
        let answer = question.await;
        let answer = answer.map_err(|status| agent.error(&status));
        let code = match &answer {
            Ok(_) => Code::Ok,
            Err(error) => status(self.rpc, error).code(),
        };
        let counts = self.router.options.metrics.router();
        counts.forwarded(agent.node(), code_name(code));
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        *asked = (asked.0 + 1, begun.elapsed());
        answer
    }

    /// Forwards a request to an agent's controller. The first call after an agent's restart can
    /// fail because the earlier connection broke: such a call was never sent, and is sent once
    /// more.
    pub(super) async fn forward<M: Clone, A, W>(
        &self,
        agent: &Agent,
        message: M,
        ask: impl Fn(ControllerClient<Channel>, Request<M>) -> W,
    ) -> Result<A>
    where
        W: Future<Output = std::result::Result<Response<A>, Status>>,
    {
        let answer = self.forward_whole(agent, message, ask).await;
        answer.map(Response::into_inner)
    }

    /// Like [`Call::forward`], with the answer's metadata.
    pub(super) async fn forward_whole<M: Clone, A, W>(
        &self,
        agent: &Agent,
        message: M,
        ask: impl Fn(ControllerClient<Channel>, Request<M>) -> W,
    ) -> Result<Response<A>>
    where
        W: Future<Output = std::result::Result<Response<A>, Status>>,
    {
        let client = agent.controller().await?;
        let request = self.request(message.clone())?;
        let question = async {
            match ask(client.clone(), request).await {
                Err(status) if beneath::<ConnectError>(&status) => match self.request(message) {
                    Ok(request) => ask(client, request).await,
                    Err(_) => Err(status),
                },
                answer => answer,
            }
        };
        self.ask(agent, question).await
    }

    /// The result for the caller.
    pub(super) fn answer<A>(&self, outcome: Result<A>) -> RpcResult<A> {
        outcome
            .map(Response::new)
            .map_err(|error| status(self.rpc, &error))
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if let (1, took) = *asked {
            let added = self.begun.elapsed().saturating_sub(took);
            self.router.options.metrics.router().added(added);
        }
    }
}
