//! The Admin service: commands of an administrator for a running driver.

mod archive;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::BoxStream;
use tonic::{Request, Streaming};

use super::{Rpc, RpcResult, Service, answer, request, status};
use crate::agent::admin_server::Admin;
use crate::agent::{
    CheckVolumeRequest, CheckVolumeResponse, DeleteSnapshotRequest, DeleteSnapshotResponse,
    ExportRequest, ExportResponse, ImportFileRequest, ImportFileResponse, ImportRequest,
    ImportResponse, import_request, import_response,
};
use crate::error::{Error, Result};
use crate::operation::{
    DeleteSnapshotOptions, Driver, Export, FileImport, Import, ImportFile, Volume, WorkClass,
};
use archive::{Input, Output};

/// Number of messages that may wait for the other side; each has about 1 MiB.
const MAX_QUEUED_MESSAGES: usize = 4;

#[tonic::async_trait]
impl Admin for Service {
    async fn check_volume(
        &self,
        request: Request<CheckVolumeRequest>,
    ) -> RpcResult<CheckVolumeResponse> {
        let CheckVolumeRequest { volume_id, repair } = request.into_inner();
        let id = request::volume_id(&volume_id);
        // This RPC determines the codes: those of a call that creates nothing.
        let checked = self.run(Rpc::NodeGetVolumeStats, id, move |driver, id| {
            driver.volumes.check_volume(id, repair)
        });
        let checked = checked.await?;
        answer(CheckVolumeResponse {
            sound: checked.sound,
            report: checked.report,
        })
    }

    async fn delete_snapshot(
        &self,
        request: Request<DeleteSnapshotRequest>,
    ) -> RpcResult<DeleteSnapshotResponse> {
        let id = request::snapshot_id(&request.into_inner().snapshot_id);
        let how = DeleteSnapshotOptions {
            of_any_group: true,
            ..DeleteSnapshotOptions::default()
        };
        self.run(Rpc::DeleteSnapshot, id, move |driver: &Driver, id| {
            driver.snapshots.delete_without_router(id, &how)
        })
        .await?;
        answer(DeleteSnapshotResponse {})
    }

    async fn export(
        &self,
        request: Request<ExportRequest>,
    ) -> RpcResult<BoxStream<ExportResponse>> {
        let asked = export(request.into_inner());
        let asked = asked.map_err(|error| status(Rpc::CreateSnapshot, &error))?;
        let (to, sent) = mpsc::channel(MAX_QUEUED_MESSAGES);
        let mut output = Output::new(to.clone(), self.driver.clone());
        let driver = self.driver.clone();
        tokio::spawn(async move {
            let work = move |driver: &Driver| driver.snapshots.export(&asked, &mut output);
            let done = driver.run_blocking_in(WorkClass::Long, work).await;
            if let Err(error) = done {
                // If the reader is gone, there is no one to tell.
                let _ = to.send(Err(status(Rpc::CreateSnapshot, &error))).await;
            }
        });
        answer(Box::pin(ReceiverStream::new(sent)))
    }

    async fn import(
        &self,
        request: Request<Streaming<ImportRequest>>,
    ) -> RpcResult<ImportResponse> {
        let mut messages = request.into_inner();
        let first = messages.message().await?.unwrap_or_default();
        let asked = import(&first).map_err(|error| status(Rpc::CreateVolume, &error))?;
        let (to, read) = mpsc::channel(MAX_QUEUED_MESSAGES);
        // Ends when the import does not read any more.
        tokio::spawn(async move {
            let mut next = Ok(Some(first.data));
            while let Ok(Some(data)) = next
                && to.send(Ok(data)).await.is_ok()
            {
                next = messages.message().await.map(|it| it.map(|it| it.data));
                if let Err(error) = &next {
                    let _ = to.send(Err(error.message().to_string())).await;
                }
            }
        });
        let input = Input::new(read, self.driver.clone());
        let work = move |driver: &Driver| driver.volumes.import(&asked, Box::new(input));
        let made = self.driver.run_blocking_in(WorkClass::Long, work).await;
        let made = made.map_err(|error| status(Rpc::CreateVolume, &error))?;
        answer(ImportResponse {
            volumes: made.iter().map(imported).collect(),
        })
    }

    async fn import_file(
        &self,
        request: Request<ImportFileRequest>,
    ) -> RpcResult<ImportFileResponse> {
        let asked = import_file(request.get_ref());
        let asked = asked.map_err(|error| status(Rpc::CreateVolume, &error))?;
        let work = move |driver: &Driver| driver.volumes.import_file(&asked);
        let made = self.driver.run_blocking_in(WorkClass::Long, work).await;
        let made = made.map_err(|error| status(Rpc::CreateVolume, &error))?;
        let (volume, obstacle) = match made {
            FileImport::Shared(volume) => (Some(imported(&volume)), String::new()),
            FileImport::Possible => (None, String::new()),
            FileImport::Obstacle(why) => (None, why),
        };
        answer(ImportFileResponse { volume, obstacle })
    }
}

/// Parses the request for a volume that shares the blocks of a file.
pub(super) fn import_file(request: &ImportFileRequest) -> Result<ImportFile> {
    Ok(ImportFile {
        import: import_options(request.options.as_ref())?,
        path: request.path.clone().into(),
        identity: request.identity,
        dry_run: request.dry_run,
    })
}

/// Parses the request for an archive.
pub(super) fn export(request: ExportRequest) -> Result<Export> {
    if request.snapshot_ids.is_empty() {
        return Err(Error::invalid("snapshot_ids", "are missing"));
    }
    Ok(Export {
        snapshot_ids: request.snapshot_ids,
        base_snapshot_ids: request.base_snapshot_ids,
    })
}

/// Parses the first message of an import.
pub(super) fn import(first: &ImportRequest) -> Result<Import> {
    import_options(first.options.as_ref())
}

fn import_options(options: Option<&import_request::Options>) -> Result<Import> {
    let options =
        options.ok_or_else(|| Error::invalid("options", "are missing in the first message"))?;
    let given = |text: &str| Some(text.to_string()).filter(|text| !text.is_empty());
    Ok(Import {
        name: given(&options.name),
        prefix: options.prefix.clone(),
        pool: given(&options.pool),
        size: Some(options.size_bytes).filter(|size| *size > 0),
        more: options.more,
    })
}

fn imported(volume: &Volume) -> import_response::Volume {
    import_response::Volume {
        volume_id: volume.id.to_string(),
        size_bytes: volume.size,
        is_complete: volume.is_complete,
    }
}
