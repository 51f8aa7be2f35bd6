//! What PersistentVolumes of volumes have to contain.

use tonic::Status;

use crate::agent::describe_volumes_response::Volume;
use crate::agent::{DescribeVolumesRequest, DescribeVolumesResponse};
use crate::error::{Error, Result};
use crate::model::FsType;
use crate::operation::{DescribedVolume, MAX_DESCRIBED};
use crate::service::{Rpc, Service};

/// The IDs of a request.
pub(super) fn ids(asked: DescribeVolumesRequest) -> Result<Vec<String>> {
    match asked.volume_ids.len() > MAX_DESCRIBED {
        true => Err(Error::invalid(
            "volume_ids",
            format!("has more than {MAX_DESCRIBED} IDs"),
        )),
        false => Ok(asked.volume_ids),
    }
}

impl Service {
    pub(super) async fn handle_describe_volumes(
        &self,
        asked: DescribeVolumesRequest,
    ) -> Result<DescribeVolumesResponse, Status> {
        let found = self
            .run(Rpc::ControllerGetVolume, ids(asked), |driver, ids| {
                driver.volumes.describe_volumes(ids)
            })
            .await?;
        Ok(DescribeVolumesResponse {
            volumes: found.into_iter().map(message).collect(),
        })
    }
}

fn message(found: DescribedVolume) -> Volume {
    Volume {
        volume_id: found.id.to_string(),
        size_bytes: found.size,
        file_system: found.fs.map_or("", FsType::name).into(),
        for_readers: found.is_for_readers,
        claim: found.claim.unwrap_or_default(),
        problem: found.problem.unwrap_or_default(),
    }
}
