//! The client of the Admin service: commands of this program call it while a driver is running.

use std::io::ErrorKind;
use std::path::Path;

use tokio::net::UnixStream;
use tonic::transport::Endpoint;

use crate::agent::admin_client::AdminClient;
use crate::agent::{CheckVolumeRequest, CheckVolumeResponse};
use crate::error::{Error, Result, chain};

/// Asks the driver at a socket to check a volume, and waits without a time limit. `None` if no
/// driver listens there.
pub async fn check_volume(
    socket: &Path,
    volume_id: &str,
    repair: bool,
) -> Result<Option<CheckVolumeResponse>> {
    let failed = |error: &dyn std::error::Error| {
        Error::unreachable(format!("the driver at {}", socket.display()), chain(error))
    };
    match UnixStream::connect(socket).await {
        Ok(_) => {}
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::NotFound | ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(failed(&error)),
    }
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display()));
    let endpoint = endpoint.map_err(|error| failed(&error))?;
    let channel = endpoint.connect().await.map_err(|error| failed(&error))?;
    let request = CheckVolumeRequest {
        volume_id: volume_id.to_string(),
        repair,
    };
    let answer = AdminClient::new(channel).check_volume(request).await;
    match answer {
        Ok(answer) => Ok(Some(answer.into_inner())),
        Err(status) => Err(Error::Forwarded {
            code: status.code() as i32,
            message: status.message().to_string(),
        }),
    }
}
