//! Long operations and reads leave threads for the calls of the kubelet.

use std::path::Path;

use super::*;
use crate::cut::CutInterfaces;
use crate::host::memory::MemoryHost;
use crate::operation::tests::{pool, settings};

fn driver() -> Arc<Driver> {
    let host = MemoryHost::new();
    host.make_folder(Path::new("/var/lib/slackwater")).unwrap();
    let settings = settings(&["a=memory:", "b=memory:"].map(pool));
    Arc::new(Driver::start(settings, CutInterfaces::simulated(host)).unwrap())
}

/// Operations that hang until the test ends them.
struct Hung {
    driver: Arc<Driver>,
    tasks: Vec<tokio::task::JoinHandle<Result<()>>>,
    ended: Arc<AtomicBool>,
}

impl Hung {
    fn on(driver: &Arc<Driver>) -> Hung {
        Hung {
            driver: driver.clone(),
            tasks: Vec::new(),
            ended: Arc::default(),
        }
    }

    /// Starts one more operation, and returns once it runs.
    async fn begin(&mut self, class: WorkClass, first: fn(&Driver) -> Result<()>) {
        let (driver, ended) = (self.driver.clone(), self.ended.clone());
        let (begun, wait) = tokio::sync::oneshot::channel();
        self.tasks.push(tokio::spawn(async move {
            let hang = move |driver: &Driver| {
                first(driver)?;
                let _ = begun.send(());
                while !ended.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(())
            };
            driver.run_blocking_in(class, hang).await
        }));
        wait.await.unwrap();
    }
}

fn nothing(_: &Driver) -> Result<()> {
    Ok(())
}

fn at(name: &'static str) -> impl Fn(&Driver) -> Result<()> {
    move |driver| driver.pools.choose_pool(Some(name)).map(drop)
}

#[tokio::test]
async fn work_that_hangs_is_bounded_and_delays_nothing_else() {
    let driver = driver();
    for (class, most) in [
        (WorkClass::Long, MAX_OPERATIONS),
        (WorkClass::Cut, MAX_CUTS),
    ] {
        let mut hung = Hung::on(&driver);
        for _ in 0..most {
            hung.begin(class, nothing).await;
        }
        let error = driver.run_blocking_in(class, nothing).await.err().unwrap();
        assert!(matches!(error, Error::Pending { .. }), "{error}");
        driver.run_blocking(nothing).await.unwrap();
        driver
            .run_blocking_in(WorkClass::Read, at("a"))
            .await
            .unwrap();
        let other = if class == WorkClass::Long {
            WorkClass::Cut
        } else {
            WorkClass::Long
        };
        driver.run_blocking_in(other, nothing).await.unwrap();
        hung.ended.store(true, Ordering::SeqCst);
        for task in hung.tasks {
            task.await.unwrap().unwrap();
        }
        driver.run_blocking_in(class, nothing).await.unwrap();
    }
}

#[tokio::test]
async fn looks_at_a_pool_that_hangs_are_bounded_and_it_is_named() {
    let driver = driver();
    let mut hung = Hung::on(&driver);
    for _ in 0..MAX_PROBES {
        hung.begin(WorkClass::Read, |driver| {
            at("a")(driver)?;
            at("a")(driver)
        })
        .await;
    }
    let error = driver
        .run_blocking_in(WorkClass::Read, at("a"))
        .await
        .err()
        .unwrap();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("pool a"), "{error}");
    // Reads of other pools, and calls that change something, still run.
    driver
        .run_blocking_in(WorkClass::Read, at("b"))
        .await
        .unwrap();
    driver.run_blocking(at("a")).await.unwrap();
    hung.ended.store(true, Ordering::SeqCst);
    for task in hung.tasks {
        task.await.unwrap().unwrap();
    }
    driver
        .run_blocking_in(WorkClass::Read, at("a"))
        .await
        .unwrap();
    let all = driver
        .pools
        .in_flight
        .reads
        .lock()
        .unwrap()
        .values()
        .sum::<usize>();
    assert_eq!(all, 0);
}

#[tokio::test]
async fn a_look_that_panics_is_counted_off() {
    let driver = driver();
    let panics = driver.run_blocking_in(WorkClass::Read, |driver| -> Result<()> {
        at("a")(driver)?;
        panic!("on purpose")
    });
    assert!(matches!(panics.await, Err(Error::Bug { .. })));
    let all = driver
        .pools
        .in_flight
        .reads
        .lock()
        .unwrap()
        .values()
        .sum::<usize>();
    assert_eq!(all, 0);
}
