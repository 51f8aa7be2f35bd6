//! Looks up what a request name refers to on an agent.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use super::Router;
use super::agents::Agent;
use super::call::Call;
use crate::agent::FindRequest;
use crate::agent::find_request::Kind as Found;
use crate::error::Result;
use crate::model::VolumeId;
use crate::model::id::NameKind;

/// Number of agents that are asked for a name at a time.
pub(super) const AT_ONCE: usize = 64;
/// Time limit of a lookup: an agent that hangs counts as one that cannot be reached.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);

impl Router {
    /// The ID that a name has on an agent; objects on a lost pool are ignored.
    pub(super) async fn find(
        &self,
        call: &Call<'_>,
        agent: Arc<Agent>,
        question: FindRequest,
    ) -> Result<Option<VolumeId>> {
        agent.reachable().await?;
        let kind = match question.kind() {
            Found::Snapshot => NameKind::Snapshot,
            Found::Volume | Found::Unknown => NameKind::Volume,
        };
        let name = question.name.clone();
        let mut client = agent.client().await?;
        let question = call.request(question)?;
        let Ok(answer) = timeout(LOOKUP_TIMEOUT, client.find(question)).await else {
            let problem = format!(
                "it did not look up a name within {} s",
                LOOKUP_TIMEOUT.as_secs()
            );
            return Err(agent.unreachable(&problem));
        };
        let found = answer.map_err(|status| agent.error(&status))?.into_inner();
        self.found(&agent, (kind, &name), &found.id).await
    }
}
