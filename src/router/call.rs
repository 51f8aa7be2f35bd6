//! One call at the router: its deadline, who was asked for it, and how long that took.

use std::future::Future;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use tonic::metadata::MetadataMap;
use tonic::transport::Channel;
use tonic::{Code, ConnectError, Request, Response, Status};

use super::Router;
use super::agents::{Agent, beneath};
use crate::csi::controller_client::ControllerClient;
use crate::error::{Error, Result};
use crate::service::status::code_name;
use crate::service::{Answer, Rpc, status};

/// A call that is being answered. Whoever drops it (the deadline, a caller that went away) drops
/// what it asks of agents as well: their work goes on, detached there.
pub(super) struct Call<'a> {
    router: &'a Router,
    rpc: Rpc,
    begun: Instant,
    until: Option<Instant>,
    /// Number of questions, and how long the last one took.
    asked: Mutex<(u32, Duration)>,
}

impl Router {
    /// To be made before anything else is done for a request.
    pub(super) fn call<M>(&self, rpc: Rpc, request: &Request<M>) -> Call<'_> {
        let begun = Instant::now();
        Call {
            router: self,
            rpc,
            begun,
            until: timeout(request.metadata()).and_then(|left| begun.checked_add(left)),
            asked: Mutex::default(),
        }
    }
}

impl Call<'_> {
    /// Which call it is.
    pub(super) fn rpc(&self) -> Rpc {
        self.rpc
    }

    /// A request to an agent, with what is left of the time.
    pub(super) fn request<M>(&self, message: M) -> Result<Request<M>> {
        let mut request = Request::new(message);
        if let Some(until) = self.until {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Answered {
                    code: Code::DeadlineExceeded as i32,
                    message: "the call's time is over".into(),
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

    /// Forwards a request to an agent's controller. The first call after an agent's restart is
    /// told how a connection failed before it: such a call was never sent, and is sent once more.
    pub(super) async fn forward<M: Clone, A, W>(
        &self,
        agent: &Agent,
        message: M,
        ask: impl Fn(ControllerClient<Channel>, Request<M>) -> W,
    ) -> Result<A>
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
        self.ask(agent, question).await.map(Response::into_inner)
    }

    /// What the caller gets.
    pub(super) fn answer<A>(&self, outcome: Result<A>) -> Answer<A> {
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

/// `grpc-timeout`: up to eight digits and a unit, as gRPC over HTTP/2 has it.
fn timeout(metadata: &MetadataMap) -> Option<Duration> {
    let text = metadata.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let count = digits.parse::<u64>().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(count * 3600),
        "M" => Duration::from_secs(count * 60),
        "S" => Duration::from_secs(count),
        "m" => Duration::from_millis(count),
        "u" => Duration::from_micros(count),
        "n" => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_read_in_every_unit_and_nothing_else_is_one() {
        let read = |text: &str| {
            let mut metadata = MetadataMap::new();
            metadata.insert("grpc-timeout", text.parse().unwrap());
            timeout(&metadata)
        };
        for (text, duration) in [
            ("2H", Duration::from_secs(7200)),
            ("3M", Duration::from_secs(180)),
            ("10S", Duration::from_secs(10)),
            ("99999999m", Duration::from_millis(99_999_999)),
            ("5u", Duration::from_micros(5)),
            ("0n", Duration::ZERO),
        ] {
            assert_eq!(read(text), Some(duration), "{text}");
        }
        for text in [
            "",
            "S",
            "10",
            "10s",
            "-1S",
            "+1S",
            "123456789S",
            "1.5S",
            "1 S",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
        assert_eq!(timeout(&MetadataMap::new()), None);
        // What tonic itself writes.
        let mut request = Request::new(());
        request.set_timeout(Duration::from_millis(1500));
        assert_eq!(
            timeout(request.metadata()),
            Some(Duration::from_millis(1500))
        );
    }
}
