//! The client of a running driver, for the commands of this program: mostly of the Admin service.

use std::collections::HashMap;
use std::io::{ErrorKind, Write};
use std::path::Path;

use tokio::net::UnixStream;
use tokio_stream::Stream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::agent::admin_client::AdminClient;
use crate::agent::{
    CheckVolumeRequest, CheckVolumeResponse, ExportRequest, ImportFileRequest, ImportFileResponse,
    ImportRequest, ImportResponse,
};
use crate::csi::NodeGetInfoRequest;
use crate::csi::node_client::NodeClient;
use crate::error::{Error, Result, chain};
use crate::router::csi_socket;

/// Asks the driver at a socket to check a volume, and waits without a time limit. `None` if no
/// driver listens there.
pub async fn check_volume(
    socket: &Path,
    volume_id: &str,
    repair: bool,
) -> Result<Option<CheckVolumeResponse>> {
    let Some(mut client) = client(socket).await? else {
        return Ok(None);
    };
    let request = CheckVolumeRequest {
        volume_id: volume_id.to_string(),
        repair,
    };
    let answer = client.check_volume(request).await;
    answer.map(|it| Some(it.into_inner())).map_err(forwarded)
}

/// Writes an archive of snapshots of the driver at a socket.
pub async fn export(socket: &Path, request: ExportRequest, to: &mut impl Write) -> Result<()> {
    let mut client = client(socket).await?.ok_or_else(|| absent(socket))?;
    let answer = client.export(request).await.map_err(forwarded)?;
    let mut messages = answer.into_inner();
    let failed = |error: std::io::Error| Error::unreachable("the output", error.to_string());
    while let Some(message) = messages.message().await.map_err(forwarded)? {
        to.write_all(&message.data).map_err(failed)?;
    }
    to.flush().map_err(failed)
}

/// Sends an archive to the driver at a socket, which creates its volumes.
pub async fn import(
    socket: &Path,
    messages: impl Stream<Item = ImportRequest> + Send + 'static,
) -> Result<ImportResponse> {
    let mut client = client(socket).await?.ok_or_else(|| absent(socket))?;
    let answer = client.import(messages).await.map_err(forwarded)?;
    Ok(answer.into_inner())
}

/// Asks the driver at a socket for a volume that shares the blocks of a file. `None` if no driver
/// listens there, or one of an earlier release.
pub async fn import_file(
    socket: &Path,
    request: ImportFileRequest,
) -> Result<Option<ImportFileResponse>> {
    let Some(mut client) = client(socket).await? else {
        return Ok(None);
    };
    match client.import_file(request).await {
        Ok(answer) => Ok(Some(answer.into_inner())),
        Err(status) if status.code() == Code::Unimplemented => Ok(None),
        Err(status) => Err(forwarded(status)),
    }
}

/// The name of the driver at a node's socket, and where its volumes can be used.
pub async fn node(socket: &Path) -> Result<(String, HashMap<String, String>)> {
    let (channel, name) = csi_socket::driver(socket, None).await?;
    let request = NodeGetInfoRequest {};
    let answer = NodeClient::new(channel).node_get_info(request).await;
    let topology = answer.map_err(forwarded)?.into_inner().accessible_topology;
    Ok((name, topology.unwrap_or_default().segments))
}

fn forwarded(status: Status) -> Error {
    Error::Forwarded {
        code: status.code() as i32,
        message: status.message().to_string(),
    }
}

fn absent(socket: &Path) -> Error {
    let driver = format!("the driver at {}", socket.display());
    Error::unreachable(driver, "nothing listens there")
}

/// `None` if no driver listens at the socket.
async fn client(socket: &Path) -> Result<Option<AdminClient<Channel>>> {
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
    Ok(Some(AdminClient::new(channel)))
}
