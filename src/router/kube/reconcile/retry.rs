//! Requests that are sent again while the API server does not answer.

use std::time::Duration;

use ::kube::Error as KubeError;

use crate::error::chain;
use crate::router::kube::API_TIMEOUT;

/// Why a request was given up.
pub(in crate::router::kube) enum Unsent {
    /// The API server rejected it, which it would do again.
    Rejected(String),
    /// The API server did not answer, or failed.
    Unanswered(String),
}

/// Sends a request, and sends it again after each of these pauses unless it is answered.
pub(in crate::router::kube) async fn retried<T, W>(
    pauses: &[Duration],
    send: impl Fn() -> W,
) -> Result<T, Unsent>
where
    W: Future<Output = Result<T, KubeError>>,
{
    let mut pauses = pauses.iter();
    loop {
        let error = match tokio::time::timeout(API_TIMEOUT, send()).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(KubeError::Api(status))) if status.code < 500 && status.code != 429 => {
                return Err(Unsent::Rejected(status.message));
            }
            Ok(Err(error)) => chain(&error),
            Err(_) => "no answer from the API server".into(),
        };
        let Some(pause) = pauses.next() else {
            return Err(Unsent::Unanswered(error));
        };
        tokio::time::sleep(*pause).await;
    }
}
