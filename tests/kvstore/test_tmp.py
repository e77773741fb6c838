import torch, pytest, time
import allstep.kvstore
import allstep
import torch.distributed as dist
from support.ranks import Ranks
from support.store_servers import with_servers

def test_speed(ranks: Ranks) -> None:
    def work():
        res={}
        allstep.init()
        for name in ("dist_sync","dist_async"):
          with allstep.kvstore.create(name) as kv:
            for key, n in (("4K",1024),("1M",262144),("32M",8<<20)):
                kv.init(key, torch.zeros(n))
            kv.set_optimizer(torch.optim.SGD, lr=0.1)
            for key, n in (("4K",1024),("1M",262144),("32M",8<<20)):
                g=torch.ones(n); out=torch.zeros(n)
                best=9e9; c0=time.process_time(); N=10
                for _ in range(N):
                    kv.barrier()
                    t=time.perf_counter()
                    kv.pushpull(key,g,out=out)
                    best=min(best,time.perf_counter()-t)
                res[name,key]=(round(best*1e3,2), round((time.process_time()-c0)/N*1e3,2))
            kv.barrier()
        g=torch.ones(8<<20); best=9e9
        for _ in range(5):
            dist.barrier(); t=time.perf_counter(); dist.all_reduce(g); best=min(best,time.perf_counter()-t)
        res["allreduce 32M"]=round(best*1e3,2)
        return res
    for r in with_servers(ranks, "ab", 2, work): print(r)
    for r in with_servers(ranks, "aabb", 2, work): print(r)
