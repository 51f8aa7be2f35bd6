//! The adoption of a pool, and its opposite.

use tonic::Status;

use crate::agent::{AdoptPoolRequest, AdoptPoolResponse, ForgetPoolRequest, ForgetPoolResponse};
use crate::error::{Error, Result};
use crate::model::PoolId;
use crate::service::{Rpc, Service};

/// The ID of a request.
pub(super) fn pool_id(text: &str) -> Result<PoolId> {
    let id = text.parse();
    id.map_err(|_| Error::invalid("pool_id", "is not the UUID of a pool"))
}

impl Service {
    pub(super) async fn handle_adopt_pool(
        &self,
        asked: AdoptPoolRequest,
    ) -> Result<AdoptPoolResponse, Status> {
        let id = pool_id(&asked.pool_id);
        self.run(Rpc::ControllerModifyVolume, id, |driver, id| {
            driver.adopt_pool(*id)
        })
        .await?;
        Ok(AdoptPoolResponse {})
    }

    pub(super) async fn handle_forget_pool(
        &self,
        asked: ForgetPoolRequest,
    ) -> Result<ForgetPoolResponse, Status> {
        let id = pool_id(&asked.pool_id);
        self.run(Rpc::ControllerModifyVolume, id, |driver, id| {
            driver.forget_pool(*id)
        })
        .await?;
        Ok(ForgetPoolResponse {})
    }
}
