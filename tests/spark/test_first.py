from tests.spark.conftest import Reconciler
from tests.spark.world import World, Order
from datetime import timedelta
from tests.spark.world import START
import time

def test_clean(reconcile: Reconciler, world: World) -> None:
    world.add_many(1000)
    for i in range(2):
        t=time.time(); result = reconcile.run(full=True); print("took", time.time()-t)
    print(reconcile.said.getvalue())
    print(result["totals"])
    world.pay(Order(number=5001))
    world.app.execute("update orders_order set total = 77 where id = 5")
    world.send(Order(number=6001))
    world.app.execute("delete from points_entry where order_id = 9")
    result = reconcile.run(full=True)
    for r in reconcile.rows(result): print(r)
    print(reconcile.said.getvalue())
    open("/tmp/h5_report.html","w").write((reconcile.folder/"out/report.html").read_text())
    assert 0
