//! Lists of all objects, merged from the agents.
//!
//! IDs are ordered by their pools first, so a page consists of the entries of a few pools, one
//! after the other, each requested from its agent separately. Agents that are not needed for a page
//! must at least have answered recently.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::model::{PoolId, VolumeId};
use crate::operation::MAX_LISTED;
use crate::router::Router;
use crate::router::agents::Agent;
use crate::router::call::Call;
use crate::router::checked;
use crate::service::{ONLY_POOL, request};
use futures_util::future::try_join_all;

/// Number of agents that are asked at a time for one page.
const MAX_ASKED_AT_ONCE: usize = 32;

/// One page of an agent's entries, ordered by ID, and the token of the next page, which is empty at
/// the end of the list.
pub(super) type Part<T> = (Vec<T>, String);

/// The requested part of a list.
pub(super) struct Wanted {
    after: Option<VolumeId>,
    limit: usize,
}

impl Wanted {
    /// Parses it from a request.
    pub(super) fn new(max_entries: i32, starting_token: &str) -> Result<Wanted> {
        let after = match starting_token {
            "" => None,
            token => Some(token.parse().map_err(|_| Error::BadToken {
                token: token.to_string(),
            })?),
        };
        let limit = match request::entries(max_entries)? {
            0 => MAX_LISTED,
            some => some.min(MAX_LISTED),
        };
        Ok(Wanted { after, limit })
    }
}

/// A pool to be listed.
struct Listed {
    pool: PoolId,
    agent: Arc<Agent>,
    /// Expected number of entries, used only to choose how many pools to query at once.
    guess: usize,
}

/// The request to one agent.
pub(super) struct Ask {
    /// Maximum number of entries.
    pub(in crate::router) max_entries: i32,
    /// The page begins after this token.
    pub(in crate::router) starting_token: String,
    /// List only this pool; the agent fails if it does not have it any more.
    pub(in crate::router) pool: PoolId,
}

impl Router {
    /// A page of all agents' entries, and the token of the next one. It fails unless every pool
    /// that is not lost is available.
    pub(super) async fn list<T, W>(
        &self,
        wanted: &Wanted,
        id: impl Fn(&T) -> String,
        ask: impl Fn(Arc<Agent>, Ask) -> W,
    ) -> Result<(Vec<T>, String)>
    where
        W: Future<Output = Result<Part<T>>>,
    {
        let pools = self.all_pools().await?;
        let from = |listed: &&Listed| wanted.after.is_none_or(|after| listed.pool >= after.pool);
        let mut pools = pools.iter().filter(from).peekable();
        let mut page: Vec<T> = Vec::new();
        // One more entry than requested shows whether there is a next page.
        while page.len() <= wanted.limit && pools.peek().is_some() {
            let most = wanted.limit + 1 - page.len();
            let mut batch = Vec::new();
            let mut guess = 0;
            while batch.len() < MAX_ASKED_AT_ONCE && guess < most {
                let Some(next) = pools.next() else { break };
                guess += next.guess;
                batch.push(next);
            }
            let asked = batch
                .iter()
                .map(|listed| self.list_pool(listed, wanted.after, most, (&id, &ask)));
            for part in try_join_all(asked).await? {
                page.extend(part);
                if page.len() > wanted.limit {
                    break;
                }
            }
        }
        let more = page.len() > wanted.limit;
        page.truncate(wanted.limit);
        let token = page.last().filter(|_| more).map(&id);
        Ok((page, token.unwrap_or_default()))
    }

    /// All existing pools, ordered by ID, each with its agent; fails with the name of what is
    /// missing. Lost pools are left out.
    async fn all_pools(&self) -> Result<Vec<Listed>> {
        self.agents.all_asked()?;
        let mut agents = self.agents.all();
        agents.retain(|agent| !self.is_written_off(agent));
        // In parallel, because several may be unreachable.
        try_join_all(agents.iter().map(|agent| agent.reachable())).await?;
        let mut pools = BTreeMap::<PoolId, Vec<_>>::new();
        for agent in &agents {
            for shown in agent.seen().pools.iter() {
                let having = pools.entry(shown.id).or_default();
                having.push((agent.clone(), shown.clone()));
            }
        }
        for known in self.cluster.known_pools() {
            if !known.lost && !self.cluster.is_lost(known.id) && !pools.contains_key(&known.id) {
                return Err(self.unreported(known.id));
            }
        }
        let mut listed = Vec::new();
        for (pool, showing) in pools {
            let forgotten = showing.iter().all(|(_, shown)| shown.forgotten);
            if forgotten || self.cluster.is_lost(pool) {
                continue;
            }
            if let Some(agent) = self.the_one(pool, &showing).await? {
                let guess = guess(&agent, pool);
                listed.push(Listed { pool, agent, guess });
            }
        }
        // An agent can also have a configured pool whose ID is not known and that is not served.
        for agent in &agents {
            if let Some(problem) = unseen_pool(agent) {
                return Err(agent.unreachable(&problem));
            }
        }
        Ok(listed)
    }

    /// Entries of one pool, limited in number. The agent's IDs must belong to the pool and ascend,
    /// so that the pages come to an end.
    async fn list_pool<T, W>(
        &self,
        listed: &Listed,
        after: Option<VolumeId>,
        most: usize,
        (id, ask): (impl Fn(&T) -> String, impl Fn(Arc<Agent>, Ask) -> W),
    ) -> Result<Vec<T>>
    where
        W: Future<Output = Result<Part<T>>>,
    {
        let mut last = after.filter(|after| after.pool == listed.pool);
        let mut entries = Vec::new();
        while entries.len() < most {
            let left = most - entries.len();
            let question = Ask {
                max_entries: i32::try_from(left).unwrap_or(i32::MAX),
                starting_token: last.map(|last| last.to_string()).unwrap_or_default(),
                pool: listed.pool,
            };
            let (part, next_token) = ask(listed.agent.clone(), question).await?;
            let goes_on = !next_token.is_empty();
            let ids: Vec<String> = part.iter().map(&id).collect();
            let verdict = checked::page(Some(listed.pool), last, left, (&ids, goes_on));
            last = self.checked(&listed.agent, verdict)?;
            entries.extend(part);
            if !goes_on {
                break;
            }
        }
        Ok(entries)
    }
}

/// Number of entries that a pool had recently; at least one, because it may have more by now.
fn guess(agent: &Agent, pool: PoolId) -> usize {
    let description = agent.seen().description;
    let pools = description
        .iter()
        .flat_map(|description| &description.pools);
    let mut found = pools.filter(|shown| shown.id == pool.to_string());
    let count = found
        .next()
        .map_or(0, |shown| shown.volumes.max(shown.snapshots));
    usize::try_from(count).unwrap_or(0).max(1)
}

/// A configured pool that is not served and whose ID is not known.
fn unseen_pool(agent: &Agent) -> Option<String> {
    let description = agent.seen().description?;
    let unseen = description.pools.iter().find(|pool| pool.id.is_empty())?;
    Some(format!(
        "its pool {} is not served: {}",
        unseen.name, unseen.refusal
    ))
}

/// A request for the list of one pool.
pub(super) fn of_pool<M>(call: &Call<'_>, message: M, ask: &Ask) -> Result<tonic::Request<M>> {
    let mut request = call.request(message)?;
    if let Ok(pool) = ask.pool.to_string().parse() {
        request.metadata_mut().insert(ONLY_POOL, pool);
    }
    Ok(request)
}
