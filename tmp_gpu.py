import torch,time,sys,statistics as st
sys.path.insert(0,'src')
from dataclasses import replace
from dpfl.bench.workloads import *
from dpfl.bench import loop
from dpfl.clients.ways import ways
from dpfl.clients.stacked import StackedClients
from dpfl.federation import Records
from dpfl.privacy.ledger import Charged
dev=torch.device('cuda')
print(torch.__version__,torch.cuda.get_device_name(),'tf32',torch.backends.cuda.matmul.allow_tf32,torch.backends.cudnn.allow_tf32)
torch.backends.cudnn.allow_tf32=False
a=torch.randn(8192,8192,device=dev)
def med(f,n,warm=2):
    for _ in range(warm): f()
    ts=[]
    for _ in range(n):
        torch.cuda.synchronize();t=time.perf_counter();f();torch.cuda.synchronize();ts.append(time.perf_counter()-t)
    return st.median(ts)*1e3
g=med(lambda:a@a,10);print('gemm fp32 TFLOP/s',2*8192**3/g/1e9)
for n in sys.argv[1:]:
    w=WORKLOADS[n]
    if n=='W2': w=replace(w,clients=350,cohort=350)
    p=draw(w,dev);streams=Streams(1)
    S=StackedClients(p.model,p.records,streams,ways=ways(p.model,Records(p.records[0].x[:8],p.records[0].y[:8])))
    ch={c:Charged(w.order,w.records) for c in p.cohort};wt={c:1/len(p.cohort) for c in p.cohort}
    k=[0]
    def ours():
        k[0]+=1
        return p.broadcast+S.perform(ch,p.broadcast,k[0],apart=False).weighted_sum(wt)
    m=med(ours,{'W2':3}.get(n,20),3); l=med(loop.prepare(p),{'W2':1,'W1':5,'W4':5}.get(n,10),1)
    print(n,'ours %.3f loop %.3f ratio %.1f chunks %d mem %.1f GB floor %.3f'%(m,l,l/m,0,torch.cuda.max_memory_allocated()/1e9,w.flops_a_round/(2*8192**3/g)))
    if n=="W4": continue
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU,torch.profiler.ProfilerActivity.CUDA]) as pr:
        ours();torch.cuda.synchronize()
    ev=[e for e in pr.key_averages() if e.self_device_time_total>0]
    tot=sum(e.self_device_time_total for e in ev)
    print('  gpu busy ms',tot/1e3,'kernels',sum(e.count for e in ev))
    for e in sorted(ev,key=lambda e:-e.self_device_time_total)[:14]: print('   %8.1f us %4d %s'%(e.self_device_time_total,e.count,e.key[:90]))
    import cProfile,pstats
    pr=cProfile.Profile();pr.enable()
    for _ in range(50 if n!='W2' else 0): ours()
    pr.disable();pstats.Stats(pr).sort_stats("tottime").print_stats(8)
    # agreement of graph and eager: same seeds, replayed and fresh
    S2=StackedClients(p.model,p.records,streams,ways=ways(p.model,Records(p.records[0].x[:8],p.records[0].y[:8])))
    a1=[S.perform(ch,p.broadcast,r,apart=False).weighted_sum(wt).clone() for r in (101,102,103)]
    b1=[S2.perform(ch,p.broadcast,r,apart=False).weighted_sum(wt).clone() for r in (103,)]
    print('  replay vs eager',((a1[2]-b1[0]).norm()/b1[0].norm()).item(),'rounds differ',((a1[2]-a1[1]).norm()/b1[0].norm()).item())
