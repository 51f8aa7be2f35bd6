//! The driver at a CSI socket: a connection to it, and the name that it reports.

use std::path::Path;
use std::time::Duration;

use tonic::transport::{Channel, Endpoint};

use super::call::within;
use crate::csi::GetPluginInfoRequest;
use crate::csi::identity_client::IdentityClient;
use crate::error::{Error, Result, chain};

/// A running driver answers this request at once.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The error for a driver at a socket that cannot be asked.
pub(super) fn unreachable(socket: &Path, reason: String) -> Error {
    Error::unreachable(format!("the driver at {}", socket.display()), reason)
}

/// A connection to the driver at a socket, and the driver's name. The name decides which objects of
/// the cluster are the driver's, so it is never assumed: an error if it differs from `expected`.
pub async fn driver(socket: &Path, expected: Option<&str>) -> Result<(Channel, String)> {
    let failed = |error: &dyn std::error::Error| unreachable(socket, chain(error));
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()));
    let endpoint = endpoint.map_err(|error| failed(&error))?;
    let channel = endpoint.connect().await.map_err(|error| failed(&error))?;
    let question = within(GetPluginInfoRequest {}, REQUEST_TIMEOUT);
    let answer = IdentityClient::new(channel.clone());
    let answer = answer.clone().get_plugin_info(question).await;
    let answer = answer.map_err(|status| unreachable(socket, status.message().to_string()))?;
    let name = answer.into_inner().name;
    match expected {
        Some(expected) if expected != name => Err(Error::invalid(
            "--driver-name",
            format!(
                "the driver at {} is {name}, not {expected}; omit --driver-name, or give the socket of the other driver as --endpoint",
                socket.display()
            ),
        )),
        _ => Ok((channel, name)),
    }
}
