//! Runs a program in a container of a pod, with the user's permission for `pods/exec`.
//!
//! The messages are those of `v4.channel.k8s.io` and `v5.channel.k8s.io`: the first byte is the channel.
//! The program has succeeded only if the API server reports that it has; a connection that ends before
//! that is a failure.

use std::io::{self, Write};
use std::time::Duration;

use futures_util::future::{Either, select};
use futures_util::{Sink, SinkExt, Stream, StreamExt};
use k8s_openapi::Resource;
use k8s_openapi::api::core::v1::Pod;
use kube::api::AttachParams;
use kube::core::Request;
use serde_json::Value;
use tokio::sync::mpsc::Receiver;
use tokio_tungstenite::tungstenite::{Error, Message};

use crate::cluster::Cluster;
use crate::driver_pod::DriverPod;
use crate::failure::{FAILED, Failure, Result};

/// How often a connection is used at least, because proxies end silent ones. The answers show that the
/// API server is still there.
const PING_INTERVAL: Duration = Duration::from_secs(30);

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
/// How the program has ended, as a Status.
const STATUS: u8 = 3;
/// The end of a channel, whose number follows. Only the fifth version of the protocol has it.
const CLOSE: u8 = 255;

/// Pieces of stdin, and the error that has ended it.
pub type Input = Receiver<io::Result<Vec<u8>>>;

/// Runs the program, writes its stdout to `out` and its stderr to stderr, and returns its exit code.
/// What `out` does not take is not read from the connection either.
pub async fn run(
    cluster: &Cluster,
    pod: &DriverPod,
    words: &[String],
    out: &mut dyn Write,
    input: Option<Input>,
) -> Result<u8> {
    let action = format!("running {} in {}", join_words(words), pod.title());
    let params = AttachParams::default()
        .container(pod.container)
        .stdin(input.is_some());
    let folder = format!(
        "/api/v1/namespaces/{}/{}",
        pod.namespace,
        Pod::URL_PATH_SEGMENT
    );
    let words = words.iter().map(String::as_str);
    let request = Request::new(folder).exec(&pod.pod, words, &params);
    let request = request.map_err(|error| Failure::failed(format!("{action}: {error}")))?;
    let connection = cluster.stream_client()?.connect(request).await;
    let connection = connection.map_err(|error| Failure::of(&action, &error))?;
    if input.is_some() && !connection.supports_stream_close() {
        return Err(Failure::failed(format!(
            "{action}: the API server does not have v5.channel.k8s.io, without which the end of stdin cannot be sent; use kubectl exec -i"
        )));
    }
    let (send, receive) = connection.into_stream().split();
    let ended = receive_all(receive, out);
    let sent = send_all(send, input);
    // What has arrived decides, also if nothing can be sent any more.
    let ended = match select(Box::pin(ended), Box::pin(sent)).await {
        Either::Left((ended, _)) => ended,
        Either::Right((failure, _)) => Err(failure),
    };
    ended.map_err(|failure| Failure {
        message: format!("{action}: {}", failure.message),
        ..failure
    })
}

/// A command line, as a person would write it. It is only printed.
pub fn join_words(words: &[String]) -> String {
    words.join(" ")
}

async fn receive_all(
    mut messages: impl Stream<Item = std::result::Result<Message, Error>> + Unpin,
    out: &mut dyn Write,
) -> Result<u8> {
    let broken = |why: &str| {
        Failure::failed(format!(
            "the connection ended before the command did, so it is not known how it has ended{why}"
        ))
    };
    loop {
        let message = match messages.next().await {
            Some(Ok(Message::Binary(message))) => message,
            Some(Ok(_)) => continue,
            Some(Err(error)) => return Err(broken(&format!(": {error}"))),
            None => return Err(broken("")),
        };
        match message.split_first() {
            Some((&STDOUT, data)) => {
                let written = out.write_all(data).and_then(|()| out.flush());
                written.map_err(|error| Failure::failed(format!("writing its output: {error}")))?;
            }
            // A reader that is gone does not end the command.
            Some((&STDERR, data)) => drop(io::stderr().write_all(data)),
            Some((&STATUS, status)) if !status.is_empty() => return exit_code(status),
            _ => {}
        }
    }
}

/// Sends stdin, and pings. Returns only if stdin cannot be read: without its rest, the program would take
/// what it has for the whole. The receivers learn that the connection has ended.
async fn send_all(
    mut messages: impl Sink<Message, Error = Error> + Unpin,
    mut input: Option<Input>,
) -> Failure {
    loop {
        let next = async {
            match &mut input {
                Some(input) => input.recv().await,
                None => std::future::pending().await,
            }
        };
        let message = match tokio::time::timeout(PING_INTERVAL, next).await {
            Err(_) => Message::Ping(Vec::new().into()),
            Ok(Some(Ok(data))) => {
                let mut message = Vec::with_capacity(data.len() + 1);
                message.push(STDIN);
                message.extend_from_slice(&data);
                Message::binary(message)
            }
            Ok(Some(Err(error))) => return Failure::failed(format!("reading stdin: {error}")),
            Ok(None) => {
                input = None;
                Message::binary(vec![CLOSE, STDIN])
            }
        };
        if messages.send(message).await.is_err() {
            return std::future::pending().await;
        }
    }
}

/// The exit code in a Status. One that the program has not ended with itself is a failure.
fn exit_code(status: &[u8]) -> Result<u8> {
    let status: Value = serde_json::from_slice(status)
        .map_err(|error| Failure::failed(format!("reading how it has ended: {error}")))?;
    if status["status"] == "Success" {
        return Ok(0);
    }
    if status["reason"] != "NonZeroExitCode" {
        let message = status["message"].as_str().unwrap_or("without a reason");
        return Err(Failure::failed(format!("it failed: {message}")));
    }
    let causes = status["details"]["causes"].as_array();
    let mut causes = causes.into_iter().flatten();
    let code = causes.find(|cause| cause["reason"] == "ExitCode");
    let code = code.and_then(|cause| cause["message"].as_str()?.parse().ok());
    Ok(code.filter(|code| *code != 0).unwrap_or(FAILED))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(status: &Value) -> std::result::Result<u8, String> {
        exit_code(status.to_string().as_bytes()).map_err(|failure| failure.message)
    }

    #[test]
    fn only_a_reported_success_is_one() {
        let json = |text: &str| serde_json::from_str(text).unwrap();
        assert_eq!(code(&json(r#"{"status": "Success"}"#)), Ok(0));
        let ended = |message: &str| {
            code(
                &serde_json::json!({"status": "Failure", "reason": "NonZeroExitCode", "message": "x",
                "details": {"causes": [{"reason": "ExitCode", "message": message}]}}),
            )
        };
        assert_eq!(ended("64"), Ok(64));
        assert_eq!(ended("137"), Ok(137));
        // None of these is a success.
        for wrong in ["0", "-1", "256", "", "x"] {
            assert_eq!(ended(wrong), Ok(FAILED), "{wrong}");
        }
        assert_eq!(
            code(&json(
                r#"{"status": "Failure", "reason": "NonZeroExitCode"}"#
            )),
            Ok(FAILED)
        );
        for other in ["{}", r#"{"status": "Failure", "message": "x"}"#, "7"] {
            assert!(code(&json(other)).is_err(), "{other}");
        }
        assert!(exit_code(b"Success").is_err());
    }
}
